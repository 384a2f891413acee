"""Loss scales and an optimizer that applies them, for any PyTorch model, converted or not."""
