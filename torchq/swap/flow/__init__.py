"""What a run on an example decides: which tensors share a range, which results are quantized."""
