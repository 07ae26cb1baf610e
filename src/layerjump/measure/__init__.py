"""Numbers about states, predictions and time: tensors in, numbers out."""
