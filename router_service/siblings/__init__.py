"""Calls between the processes of one router: counters and moves."""
