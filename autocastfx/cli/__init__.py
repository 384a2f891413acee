"""The command line ``autocastfx``."""
