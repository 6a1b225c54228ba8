"""Folding a BatchNorm into the layer beside it."""
