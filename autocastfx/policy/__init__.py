"""Op lists and kernel facts: read them, check them, match them to nodes, write and compare them."""
