"""Stopping early: rules, generation that follows them, and calibration that finds them."""
