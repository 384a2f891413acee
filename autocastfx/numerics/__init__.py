"""Tools that run converted graphs to find values, gradients and ops that 16 bits harm."""
