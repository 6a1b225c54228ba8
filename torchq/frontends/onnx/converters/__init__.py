"""The converters, one file for each family of operators.

Importing this package fills the registry.
"""

from torchq.frontends.onnx.converters import (
    activations,
    arithmetic,
    attention,
    control,
    convolutions,
    fused,
    indexing,
    matmul,
    movement,
    normalization,
    pooling,
    quantization,
    recurrent,
    reductions,
    shapes,
    spectral,
    vision,
)

__all__ = [
    "activations",
    "arithmetic",
    "attention",
    "control",
    "convolutions",
    "fused",
    "indexing",
    "matmul",
    "movement",
    "normalization",
    "pooling",
    "quantization",
    "recurrent",
    "reductions",
    "shapes",
    "spectral",
    "vision",
]
