"""The runtime of converted models: ``AmpModule``, its variants, and 16-bit working copies of its parameters."""
