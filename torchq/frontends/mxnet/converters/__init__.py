"""The converters: importing this package enters them into the registry."""

from torchq.frontends.mxnet.converters import (
    activations,
    arithmetic,
    detection,
    layers,
    movement,
    normalization,
    outputs,
    pooling,
    recurrent,
    reductions,
)

__all__ = [
    "activations",
    "arithmetic",
    "detection",
    "layers",
    "movement",
    "normalization",
    "outputs",
    "pooling",
    "recurrent",
    "reductions",
]
