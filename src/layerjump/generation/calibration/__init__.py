"""Choose an exit rule that keeps a target agreement."""
