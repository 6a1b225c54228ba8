"""The converters: importing this package enters them into the registry."""

from torchq.frontends.caffe.converters import detection, layers, operators  # noqa: F401
