"""Activations replaced in a running model."""
