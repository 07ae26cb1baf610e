"""When to stop early."""
