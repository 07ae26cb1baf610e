"""The parts of `benchmarks/lenses.py`: held-out positions, our lenses, peers' lenses, scores, what is shown."""
