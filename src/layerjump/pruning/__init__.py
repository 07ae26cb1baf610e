"""Drop blocks, replace them by maps, write plain checkpoints."""
