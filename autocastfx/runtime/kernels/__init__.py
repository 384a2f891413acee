"""Kernels in Triton for CUDA, which operators call where they are measured faster."""
