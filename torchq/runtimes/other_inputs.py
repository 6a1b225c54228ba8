"""Inputs of other values than an example, on which a graph has to compute what its model does.

A trace holds one way through a forward. Branches, loops, cuts and early exits that depend on data
show on another input alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from torchq.graph import call_arguments, map_tensors


def other_inputs(model: nn.Module, example: object) -> Iterator[Any]:
    """Yield examples of the same shapes and other values, those most unlike the example first.

    Whole numbers, such as indices of tokens, change places or stay: others may be out of bounds.
    """
    args, kwargs = call_arguments(model, example)
    arguments: Any = kwargs or args
    changes = (
        (lambda x: -_flipped(x), _flipped),
        (lambda x: -_flipped(x), _same),
        (lambda x: 0.5 * _flipped(x), _flipped),
        (lambda x: 0.5 * x, _same),
    )
    for of_floats, of_others in changes:
        yield map_tensors(arguments, _chosen(of_floats, of_others))


def _chosen(
    of_floats: Callable[[Tensor], Tensor], of_others: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    return lambda x: (of_floats if x.is_floating_point() else of_others)(x)


def _flipped(x: Tensor) -> Tensor:
    return x.flip(-1) if x.dim() else x


def _same(x: Tensor) -> Tensor:
    return x
