"""The absolute maximum over given axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.errors import ConfigError

__all__ = ["reduce_amax"]


def reduce_amax(
    input: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = True
) -> Tensor:
    """The largest magnitude of ``input`` over the axes in ``axis``, without gradient, in its dtype.

    ``axis`` names what is reduced: the opposite of a descriptor's ``axis``. None reduces everything to a 0-d tensor; so do
    axes that leave a single element.

    Raises:
        ConfigError: more axes than dimensions.

    Example:
        >>> reduce_amax(torch.tensor([[1.0, -3.0], [0.5, 2.0]]), axis=1)
        tensor([[3.],
                [2.]])
    """
    with torch.no_grad():
        magnitudes = input.detach().abs()
        if axis is None:
            return magnitudes.max()
        if isinstance(axis, int):
            return magnitudes.amax(axis, keepdim=keepdims)
        if len(axis) > input.dim():
            raise ConfigError(
                f"reduce_amax: Cannot reduce more axes than there are: got {tuple(axis)}; expected at most {input.dim()} axes"
            )
        reduced = magnitudes.amax(tuple(axis), keepdim=keepdims) if len(axis) else magnitudes
        return reduced.reshape(()) if reduced.numel() == 1 else reduced
