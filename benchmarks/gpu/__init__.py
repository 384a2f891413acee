"""One command for a machine with a GPU: parity, kernel facts, speed and memory, most valuable first."""
