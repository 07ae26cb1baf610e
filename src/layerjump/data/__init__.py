"""Text in, batches of tokens out: corpora, tokenization, positions, batches."""
