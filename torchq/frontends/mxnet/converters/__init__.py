"""The converters: importing this package enters them into the registry."""

from torchq.frontends.mxnet.converters import layers, operators  # noqa: F401
