"""The command line: one subcommand a module."""
