"""Capture: turn a call of a model into a graph, by Dynamo."""
