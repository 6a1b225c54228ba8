"""Channels and groups of convolutions, in the numbers that the kernels of a runtime want."""
