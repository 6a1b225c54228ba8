"""The converters: importing this package enters them into the registry."""

from torchq.frontends.caffe.converters import (
    activations,
    arithmetic,
    detection,
    layers,
    movement,
    pooling,
)

__all__ = ["activations", "arithmetic", "detection", "layers", "movement", "pooling"]
