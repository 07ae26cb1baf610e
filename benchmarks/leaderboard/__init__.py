"""Parts of `benchmarks/lenses.py`: held-out states, our lenses, lenses of other tools, scores, tables and figure."""
