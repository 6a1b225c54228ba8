"""Folding BatchNorm into the layer beside it."""
