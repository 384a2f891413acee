"""What passes ask of a graph before they decide: units, ports, ranges, bytes. Nothing here rewrites it."""
