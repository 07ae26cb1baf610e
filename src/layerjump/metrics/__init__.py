"""Metrics of predictions, states and time."""
