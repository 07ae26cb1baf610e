"""Figures, reports and the page."""
