"""Folder for the module search path; its ``pytorch_quantization`` installs torchq.compat."""
