"""The windows of average pools, as modules and functions of torch describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SPATIAL = range(1, 4)
_OF_WINDOWS = (
    *("kernel_size", "stride", "padding", "ceil_mode"),
    *("count_include_pad", "divisor_override"),
)
#: The beginning of the name of a pool -> its arguments behind the tensor.
_ARGUMENTS = {
    "avg_pool": _OF_WINDOWS,
    "adaptive_avg_pool": ("output_size",),
    "mean": ("dim", "keepdim"),
}


@dataclass(frozen=True)
class Windows:
    """The windows over images of one shape that an average pool takes the means of.

    Attributes:
        size: the lengths of a window.
        stride: the distances between windows.
        padding: the zeros at both ends of each dimension.
        counts_padding: zeros count as elements of a window.
        is_whole: there is one window, the whole image.
        keeps_dims: the result has as many dimensions as the input.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    counts_padding: bool = True
    is_whole: bool = False
    keeps_dims: bool = True

    @property
    def area(self) -> int:
        """The number of elements of a window."""
        return torch.Size(self.size).numel()

    @property
    def are_equal(self) -> bool:
        """True if every window counts as many elements."""
        return self.counts_padding or not any(self.padding)

    def sums(self, x: Tensor) -> Tensor:
        """Return the sums over all windows, float32, added one element after another.

        Those of a window are added in order, the last dimension first, beginning with 0 where the
        first element is padding.

        Args:
            x: (N, C, *lengths), float32.
        """
        pads = [pad for pad in reversed(self.padding) for _ in range(2)]
        padded = F.pad(x, pads) if any(pads) else x
        ends = [
            (length - size) // stride * stride + 1
            for length, size, stride in zip(
                padded.shape[2:], self.size, self.stride, strict=True
            )
        ]
        total: Tensor | None = None
        for offsets in product(*map(range, self.size)):
            part = padded
            for axis, (offset, end, stride) in enumerate(
                zip(offsets, ends, self.stride, strict=True), 2
            ):
                part = part.narrow(axis, offset, end)[
                    (slice(None),) * axis + (slice(None, None, stride),)
                ]
            total = part.clone() if total is None else total.add_(part)
        assert total is not None
        return total

    def counts(self, x: Tensor) -> Tensor | float:
        """Return how many elements each window counts, as it broadcasts against the sums."""
        if self.are_equal:
            return float(self.area)
        return self.sums(torch.ones(1, 1, *x.shape[2:], device=x.device))


def windows_of_module(
    name: str, pool: nn.Module, shape: Sequence[int]
) -> Windows | None:
    """Return the windows of a module for inputs of a shape; see :func:`windows_of_call`."""
    settings = {key: getattr(pool, key, None) for key in _names_of(name)}
    return _windows(name, settings, shape)


def windows_of_call(
    name: str,
    arguments: Sequence[object],
    options: Mapping[str, object],
    shape: Sequence[int],
) -> Windows | None:
    """Return the windows of a call of a function.

    Args:
        name: the :attr:`torchq.graph.Operator.name` of the function.
        arguments: those behind the tensor.
        options: by name.
        shape: of the tensor, (N, C, *lengths) with one to three lengths.

    Returns:
        None for functions that take no means over windows of one size, for windows over the edge of
        an image, and for sums that are divided by another number than how many elements they have.
    """
    named = dict(zip(_names_of(name), arguments, strict=False))
    return _windows(name, {**named, **options}, shape)


def _names_of(name: str) -> tuple[str, ...]:
    return _ARGUMENTS.get(name.rstrip("123d").rstrip("_"), ())


def _windows(
    name: str, arguments: Mapping[str, object], shape: Sequence[int]
) -> Windows | None:
    lengths = tuple(shape[2:])
    dims = len(lengths)
    is_fitting = name == "mean" or name.endswith(f"{dims}d")
    if dims not in _SPATIAL or not is_fitting or not all(lengths):
        return None
    if name == "mean":
        return _of_mean(arguments, dims, lengths)
    if name.startswith("adaptive"):
        return _of_adaptive(arguments.get("output_size"), lengths)
    return _of_pool(arguments, lengths) if name.startswith("avg") else None


def _of_mean(
    arguments: Mapping[str, object], dims: int, lengths: tuple[int, ...]
) -> Windows | None:
    chosen = arguments.get("dim")
    if not isinstance(chosen, (tuple, list)) or set(arguments) - {"dim", "keepdim"}:
        return None
    if sorted(axis % (dims + 2) for axis in chosen) != list(range(2, dims + 2)):
        return None
    keeps_dims = bool(arguments.get("keepdim"))
    zeros = (0,) * dims
    return Windows(lengths, lengths, zeros, is_whole=True, keeps_dims=keeps_dims)


def _of_adaptive(wanted: object, lengths: tuple[int, ...]) -> Windows | None:
    results = [
        length if count is None else count
        for count, length in zip(_each(wanted, len(lengths)), lengths, strict=True)
    ]
    if any(
        not count or length % count
        for count, length in zip(results, lengths, strict=True)
    ):
        return None
    size = tuple(
        length // count for count, length in zip(results, lengths, strict=True)
    )
    is_whole = all(count == 1 for count in _each(wanted, len(lengths)))
    return Windows(size, size, (0,) * len(lengths), is_whole=is_whole)


def _of_pool(
    arguments: Mapping[str, object], lengths: tuple[int, ...]
) -> Windows | None:
    dims = len(lengths)
    size = _each(arguments.get("kernel_size"), dims)
    stride = _each(arguments.get("stride") or size, dims)
    padding = _each(arguments.get("padding") or 0, dims)
    counts_padding = arguments.get("count_include_pad")
    if arguments.get("divisor_override") or not _fit(size, stride, padding):
        return None
    # The last window may stand over the edge, unless the others fill the image.
    if arguments.get("ceil_mode") and any(
        (length + 2 * pad - width) % step
        for length, pad, width, step in zip(lengths, padding, size, stride, strict=True)
    ):
        return None
    return Windows(size, stride, padding, counts_padding in (None, True))


def _fit(*settings: tuple[object, ...]) -> bool:
    return all(isinstance(number, int) for numbers in settings for number in numbers)


def _each(value: object, dims: int) -> tuple[Any, ...]:
    """Return one number for each spatial dimension."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * dims if len(values) == 1 else values
