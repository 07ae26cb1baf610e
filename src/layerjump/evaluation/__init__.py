"""Benchmark tasks through lm-eval, and perplexity."""
