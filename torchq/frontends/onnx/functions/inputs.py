"""The shapes of inputs, which a file may fix."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.errors import InputError


def with_sizes(x: Tensor, name: str, sizes: Sequence[int | None]) -> Tensor:
    """Return ``x`` as it is.

    Args:
        x: an input.
        name: of the input in the file.
        sizes: that the file states, None for an open one.

    Raises:
        InputError: ``x`` has another shape. The file may hold these sizes in its nodes too.
    """
    if torch.jit.is_tracing():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # sizes are no numbers there
            wrong = _differ(x, sizes)
    else:
        wrong = _differ(x, sizes)
    if wrong:
        wanted = tuple("any" if size is None else size for size in sizes)
        raise InputError(
            f"{name}: got the shape {tuple(x.shape)}; expected "
            f"({', '.join(map(str, wanted))}), which the ONNX file fixes. "
            "from_onnx(path, free_batch=True) frees the first size"
        )
    return x


def _differ(x: Tensor, sizes: Sequence[int | None]) -> bool:
    return x.dim() != len(sizes) or any(
        size is not None and bool(size != own) for size, own in zip(sizes, x.shape, strict=True)
    )
