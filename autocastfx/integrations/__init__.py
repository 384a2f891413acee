"""Conversion inside what people already use: compilers and trainers."""
