"""Is a file as fast as its float one in ONNX Runtime, and which layers are not?"""
