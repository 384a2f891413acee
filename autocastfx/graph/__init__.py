"""Read graphs and nodes: values, sizes, aliases and op names. Nothing here decides or rewrites."""
