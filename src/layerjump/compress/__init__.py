"""Put matrices in the place of parts of a model."""
