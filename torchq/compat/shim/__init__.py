"""A folder for the module search path: in it ``import pytorch_quantization`` finds a module that installs :mod:`torchq.compat`."""
