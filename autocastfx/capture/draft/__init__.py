"""Capture without example inputs: the model runs on stand-ins for its inputs, and guesses are marked."""
