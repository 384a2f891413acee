"""Loss scales, and the optimizer that applies them. Needs no graph: it works with any PyTorch model."""
