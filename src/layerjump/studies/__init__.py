"""One file per study: a protocol, its numbers, what they say."""
