"""The converters: importing this package enters them into the registry."""

from torchq.frontends.onnx.converters import (  # noqa: F401
    control,
    elementwise,
    layers,
    movement,
    quantization,
    recurrent,
    reductions,
    vision,
)
