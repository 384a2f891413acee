"""Analyses of a graph that passes decide by: units, ports, ranges, bytes. Nothing here rewrites the graph."""
