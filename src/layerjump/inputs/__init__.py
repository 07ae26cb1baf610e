"""Models and text in, states out."""
