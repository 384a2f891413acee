"""The pass that decides each node, and what it decides by. Nothing here rewrites the graph."""
