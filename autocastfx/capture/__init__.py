"""From a model to a graph."""
