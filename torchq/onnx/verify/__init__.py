"""Comparing a file with its model, end to end and layer by layer in integer codes."""
