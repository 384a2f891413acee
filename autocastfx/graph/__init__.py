"""A graph and its nodes: values, sizes, aliases, and the ops they call. Nothing here decides or rewrites."""
