"""Decode kernels of the layers' own operations, on Mosaic GPU (Hopper)."""
