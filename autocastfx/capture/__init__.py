"""Capture: turn a model into a graph, with torch.export or by tracing."""
