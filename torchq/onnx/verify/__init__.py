"""Proof that an ONNX file computes what the model simulates."""
