"""What was decided for each node, read, written, edited and compared."""
