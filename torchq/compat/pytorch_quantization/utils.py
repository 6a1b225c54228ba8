"""The absolute maximum over given axes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.errors import ConfigError


def reduce_amax(
    input: Tensor, axis: int | Sequence[int] | None = None, keepdims: bool = True
) -> Tensor:
    """Return the largest magnitude of ``input`` over ``axis``, without gradient, in its dtype.

    Args:
        input: any shape.
        axis: the axes that are reduced; a descriptor's ``axis`` names those that are kept. None
            reduces everything to a 0-d tensor, and so do axes that leave a single element.
        keepdims: keep reduced axes with size 1.

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
                "reduce_amax: Cannot reduce more axes than there are: "
                f"got {tuple(axis)}; expected at most {input.dim()} axes"
            )
        reduced = (
            magnitudes.amax(tuple(axis), keepdim=keepdims) if len(axis) else magnitudes
        )
        return reduced.reshape(()) if reduced.numel() == 1 else reduced
