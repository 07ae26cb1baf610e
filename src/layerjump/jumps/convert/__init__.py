"""Lenses of other tools, imported as jumps and exported from them."""
