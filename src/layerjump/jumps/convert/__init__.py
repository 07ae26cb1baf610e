"""Lenses of other tools: one module for each format, and reading their files safely."""
