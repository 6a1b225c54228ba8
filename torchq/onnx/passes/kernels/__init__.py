"""Passes that keep to what the integer kernels of runtimes compute fast, and right."""
