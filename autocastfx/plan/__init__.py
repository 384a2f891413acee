"""Plans, the decisions and placements of a graph: make, read, write, edit and compare them."""
