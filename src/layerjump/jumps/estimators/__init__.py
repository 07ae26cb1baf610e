"""Estimators: from second-moment sums to linear maps."""
