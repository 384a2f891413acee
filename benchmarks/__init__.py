"""Measurements of autocastfx against torch.autocast; run each module with ``python -m``."""
