"""Passes that write what the kernels of runtimes compute fast, and avoid what they get wrong."""
