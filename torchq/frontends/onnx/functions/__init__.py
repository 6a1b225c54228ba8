"""Functions that converted graphs call where torch has none with ONNX's meaning."""
