"""Lenses of other tools, read as jumps and written from them: one file for each format."""
