"""Estimate a converted model's speed on a GPU from sizes and peak rates, without running it."""
