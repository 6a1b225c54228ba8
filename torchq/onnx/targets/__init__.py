"""What each runtime wants of an ONNX file."""
