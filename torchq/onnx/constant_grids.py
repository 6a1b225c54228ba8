"""Scales and zero points as constants while a model is traced for a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from torchq.functional.onnx_ops import constant_grid, quantize_dequantize_constant
from torchq.nn import TensorQuantizer

__all__ = ["constant_grids"]

_SCALE, _ZERO_POINT = "exported_scale", "exported_zero_point"


@contextmanager
def constant_grids(quantizers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Let quantizers write constants inside the ``with`` block, not arithmetic on their ranges.

    Args:
        quantizers: Those of the model. Where constants do not say all, a quantizer stays as it is.
    """
    changed = []
    try:
        for quantizer in quantizers:
            grid = _grid(quantizer)
            if grid is not None:
                changed.append(quantizer)
                for name, tensor in zip((_SCALE, _ZERO_POINT), grid, strict=True):
                    quantizer.register_buffer(name, tensor, persistent=False)
                quantizer.delegate = _write
        yield
    finally:
        for quantizer in changed:
            quantizer.delegate = None
            delattr(quantizer, _SCALE)
            delattr(quantizer, _ZERO_POINT)


def _grid(quantizer: TensorQuantizer) -> tuple[Tensor, Tensor] | None:
    """Return the constants of a quantizer; None if it has none, or none that say all."""
    d = quantizer.descriptor
    if quantizer.delegate is not None or not d.fake_quant or d.dynamic or not quantizer.calibrated:
        return None
    with torch.no_grad():
        scale, zero_point = quantizer.calculate_qparams()
        return constant_grid(scale, zero_point, d.symmetric, d.format, d.granularity)


def _write(x: Tensor, quantizer: TensorQuantizer) -> Tensor:
    """Write the pair of operators of a quantizer; it is a delegate."""
    d = quantizer.descriptor
    scale, zero_point = quantizer.get_buffer(_SCALE), quantizer.get_buffer(_ZERO_POINT)
    return quantize_dequantize_constant(x, scale, zero_point, d.format, d.granularity)
