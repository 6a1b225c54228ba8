"""Pooling of codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from torchq.lowering.modules.base import eager
from torchq.lowering.modules.kernel_cache import KeepsBound
from torchq.lowering.modules.qdq import QParamsModule
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run
from torchq.lowering.qparams import QParams

__all__ = ["AveragePooling", "CodesAvgPool2d", "CodesMaxPool2d"]

AveragePooling = nn.AvgPool2d | nn.AdaptiveAvgPool2d


class CodesMaxPool2d(nn.MaxPool2d):
    """Max pooling of uint8 codes; rounding keeps order, so it commutes with quantization."""

    def forward(self, input: Tensor) -> Tensor:
        """Largest code of each window; (N, C, H, W) or (C, H, W)."""
        pairs = [_pair(v) for v in (self.kernel_size, self.stride, self.padding, self.dilation)]
        return torch.ops.torchq.max_pool2d(input, *pairs, self.ceil_mode)


class CodesAvgPool2d(KeepsBound, QParamsModule):
    """Average pooling of uint8 codes, onto another qparams.

    As a depthwise convolution with weights of one: one kernel sums integers and rounds once, where floating point takes three passes.
    What that cannot express (windows of different sizes, padding that is not counted) is computed in floating point.

    Args:
        pool: what to do; padding counts as zeros.
        before, after: the qparams of what it reads and returns.
    """

    def __init__(self, pool: AveragePooling, before: QParams, after: QParams) -> None:
        super().__init__(before)
        self.pool, self.after = pool, after

    def get_extra_state(self) -> dict[str, Any]:
        """Both qparams as plain numbers."""
        return {**super().get_extra_state(), "after": astuple(self.after)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        super().set_extra_state(state)
        self.after = QParams(*state["after"])

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (N, C, H, W) or (C, H, W) -> codes, each image pooled."""
        if not eager(codes):
            return self._float(codes)
        run: Run = self._bound(codes.shape, lambda: self._bind(codes.shape))
        return run(codes)

    def _float(self, codes: Tensor) -> Tensor:
        return self.after.quantize(self.pool(self.qparams.dequantize(codes)))

    def _bind(self, shape: torch.Size) -> Run:
        window = (
            _window(self.pool, shape[2:])
            if len(shape) == 4 and shape.numel() and onednn.available()
            else None
        )
        if window is None:
            return self._float
        size, stride, padding = window
        channels, before, after = shape[1], self.qparams, self.after
        ones = torch.ones(channels, 1, *size, dtype=torch.int8)
        scale = torch.full((channels,), 1 / (size[0] * size[1]))
        bounds = ("none", []) if after.saturates_by_itself else ("clamp", list(after.bounds))
        return onednn.bind_conv(
            shape, None, ones, scale, None, before.scale, before.zero_point, stride, padding, [1, 1], channels,
            after.scale, after.zero_point, torch.uint8, *bounds, 1.0, 0,
        )  # fmt: skip


def _window(
    pool: AveragePooling, sizes: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Size, stride and padding of windows that are all alike, or None."""
    if isinstance(pool, nn.AdaptiveAvgPool2d):
        out = [
            size if wanted is None else wanted
            for size, wanted in zip(sizes, _pair(pool.output_size), strict=True)
        ]
        if any(not wanted or size % wanted for size, wanted in zip(sizes, out, strict=True)):
            return None
        window = [size // wanted for size, wanted in zip(sizes, out, strict=True)]
        return window, window, [0, 0]
    size, stride, padding = _pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding)
    plain = (
        not pool.ceil_mode
        and pool.divisor_override is None
        and (pool.count_include_pad or not any(padding))
    )
    return (size, stride, padding) if plain else None


def _pair(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value, value]
