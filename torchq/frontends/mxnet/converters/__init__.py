"""The converters: importing this package enters them into the registry."""

from torchq.frontends.mxnet.converters import (
    activations,
    arithmetic,
    layers,
    movement,
    normalization,
    outputs,
    pooling,
    reductions,
)

__all__ = [
    "activations",
    "arithmetic",
    "layers",
    "movement",
    "normalization",
    "outputs",
    "pooling",
    "reductions",
]
