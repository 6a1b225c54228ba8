"""Passes over an ONNX graph."""
