"""Tools above ``convert`` that run graphs node by node and say what 16 bits did to their values."""
