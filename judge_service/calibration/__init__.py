"""Calibration of raw scores, and the measures of its quality."""
