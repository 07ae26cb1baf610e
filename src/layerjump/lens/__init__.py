"""Predictions from hidden levels."""
