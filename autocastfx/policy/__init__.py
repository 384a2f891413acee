"""What op lists and kernels say about an op: read, checked, written and compared."""
