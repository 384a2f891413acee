"""Capture without example inputs: trace the model on stand-ins, and mark the dtypes that are guesses."""
