"""One command for a machine with a GPU: what this project wants to know of it, most valuable first."""
