"""The converters: importing this package enters them into the registry."""

from torchq.frontends.onnx.converters import (  # noqa: F401
    bits,
    control,
    elementwise,
    layers,
    movement,
    picking,
    quantization,
    recurrent,
    reductions,
    sequences,
    signals,
    vision,
)
