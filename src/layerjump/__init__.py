"""Linear shortcuts in transformers."""

__version__ = "0.1.0.dev0"
