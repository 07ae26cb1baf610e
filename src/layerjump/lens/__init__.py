"""Lenses: predictions from the hidden states of any level."""
