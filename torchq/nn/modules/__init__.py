"""Quantized twins of torch's modules."""
