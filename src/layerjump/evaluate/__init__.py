"""Benchmarks: tasks through lm-eval, from local files; perplexity with a sliding window."""
