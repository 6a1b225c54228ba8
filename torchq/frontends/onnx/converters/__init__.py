"""The converters, one file for each family of operators.

Importing this package fills the registry.
"""

from torchq.frontends.onnx.converters import (  # noqa: F401
    activations,
    arithmetic,
    control,
    convolutions,
    indexing,
    matmul,
    movement,
    normalization,
    pooling,
    quantization,
    recurrent,
    reductions,
    shapes,
    vision,
)
