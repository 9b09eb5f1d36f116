"""Whole cascades in virtual time, tier by tier, with judging and what escalates. No I/O."""
