"""Fake quantization by a range that stays: what follows from the range is made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchq.formats import POWER_OF_TWO, Format
from torchq.formats.granularity import Granularity
from torchq.functional.fake_quant import affine_bounds
from torchq.functional.gradient import with_signature
from torchq.functional.kernels import tiled
from torchq.functional.kernels.dispatch import mask_gradient
from torchq.functional.range import Range
from torchq.functional.scale import (
    divisor,
    scale_and_zero_point,
    scale_from_amax,
    widened_to_power_of_two,
)

#: ``kernel(x, with_mask=...)``: the quantized tensor, and the mask of the gradient if wanted.
_Kernel = Callable[..., tuple[Tensor, Tensor | None]]


@with_signature
class FixedFakeQuantizeFunction(torch.autograd.Function):
    """What a kernel gives; the gradient passes where its mask is 1."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, kernel: _Kernel) -> Any:
        """Return the quantized tensor and the mask."""
        return kernel(x, with_mask=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: Tensor) -> None:
        """Keep the mask of the gradient."""
        ctx.mark_non_differentiable(output[1])
        # Otherwise the mask would get a gradient of zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the gradient to the input."""
        grad = grads[0]
        if grad is None:
            return None, None
        (mask,) = ctx.saved_tensors
        return mask_gradient("tiled", grad, mask), None


@dataclass(frozen=True, eq=False)
class FixedFakeQuantize:
    """Fake quantization by one known range, on a CPU, with everything made of the range once.

    Calls give the bits and the gradients of :func:`torchq.functional.fake_quantize`, and none to
    the range.

    Attributes:
        shape: of the tensors that it takes; None for any.
        kernel: the function of a tensor.
    """

    shape: torch.Size | None
    kernel: _Kernel

    @classmethod
    def of(
        cls,
        range: Range,
        shape: torch.Size,
        format: Format,
        granularity: Granularity,
        scale_format: Format | None,
    ) -> FixedFakeQuantize:
        """Return the function for a range, float32 on a CPU, and tensors of a shape, unblocked."""
        ends = range.map(lambda end: granularity.align(end.detach(), shape))
        make = _symmetric if range.low is None else _affine
        kernel = make(ends, format, scale_format)
        return cls(None if ends.high.dim() == 0 else shape, kernel)

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` rounded to the grid and back; float32 or half of the right shape."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return self.kernel(x, with_mask=False)[0]
        y: Tensor = FixedFakeQuantizeFunction.apply(x, self.kernel)[0]
        return y


def _symmetric(ends: Range, format: Format, scale_format: Format | None) -> _Kernel:
    amax = ends.high
    if scale_format is POWER_OF_TWO:
        amax = widened_to_power_of_two(amax, format)
        scale_format = None
    scale = scale_from_amax(amax, format, scale_format)
    numbers = amax, divisor(amax, scale), scale
    return partial(tiled.fake_quantize_scaled, numbers=numbers, format=format)


def _affine(ends: Range, format: Format, scale_format: Format | None) -> _Kernel:
    assert ends.low is not None
    scale, point = scale_and_zero_point(ends.low, ends.high, format, scale_format)
    low, high = affine_bounds(point, format, ends.dead(format))
    return partial(
        tiled.fake_quantize_between, scale=scale, low=low, high=high, format=format
    )
