"""Interventions: patch hidden states, and replace sub-modules or blocks by linear maps."""
