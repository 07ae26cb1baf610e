"""One Hugging Face model: loading, structure, self-check, activations."""
