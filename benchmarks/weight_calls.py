"""Count the products with weights that a model computes, and those whose weight is not quantized.

The count does not rely on torchq's own report: it watches the operators that torch dispatches. A
tensor is a weight if it was computed from parameters and constants alone. A weight is quantized if
it lies on an INT8 grid, per tensor or per slice of one axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["WeightCalls", "count", "on_grid"]

PRODUCTS = {"convolution", "addmm", "mm", "bmm", "baddbmm", "linear", "_trilinear", "mkldnn_linear"}
TOLERANCE = 1e-3  # of a code; float32 rounding of scale and quotient is below 1e-4 for 8 bits


def on_grid(weight: Tensor) -> bool:
    """Return True if all values are multiples of amax / 127, per tensor or per slice of an axis."""
    weight = weight.detach().float()
    axes = [None, *range(weight.dim())]
    return any(_fits(weight, axis) for axis in axes)


def _fits(weight: Tensor, axis: int | None) -> bool:
    others = [d for d in range(weight.dim()) if d != axis]
    codes = weight / (weight.abs().amax(others, keepdim=True).clamp_min(1e-30) / 127)
    return bool((codes - codes.round()).abs().max() < TOLERANCE)


def _tensors(values: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class WeightCalls(TorchDispatchMode):
    """Counts products with weights while it is active.

    Attributes:
        total: the number of convolutions and matrix products with a weight.
        floating: the shapes of the weights that were not quantized, one for each call.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.total = 0
        self.floating: list[tuple[int, ...]] = []
        self._weights = _Storages(p for p in [*model.parameters(), *model.buffers()])
        self._constants = _Storages(())

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, count it, and note what its results were computed from."""
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        if function.overloadpacket.__name__ in PRODUCTS:
            self._count([x for x in inputs if x in self._weights and x.dim() > 1])
        kinds = [(x in self._weights, x in self._constants) for x in inputs]
        result = function(*args, **kwargs)
        for output in _tensors(result):
            self._weights.discard(output)
            self._constants.discard(output)
            if not kinds and "rand" not in function.overloadpacket.__name__:
                self._constants.add(output)
            elif kinds and all(weight or constant for weight, constant in kinds):
                (self._weights if any(w for w, _ in kinds) else self._constants).add(output)
        return result

    def _count(self, weights: list[Tensor]) -> None:
        if not weights:
            return
        self.total += 1
        if not any(on_grid(weight) for weight in weights):
            self.floating.append(tuple(weights[-1].shape))


class _Storages:
    """A set of tensors, by their storage; it keeps them alive, so that none is reused."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = {_storage(tensor): tensor.detach() for tensor in tensors}

    def add(self, tensor: Tensor) -> None:
        self._kept[_storage(tensor)] = tensor

    def discard(self, tensor: Tensor) -> None:
        self._kept.pop(_storage(tensor), None)

    def __contains__(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._kept


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def count(model: nn.Module, run: Any) -> WeightCalls:
    """Return the counts of one call of ``run``, without torch's fused attention layers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), WeightCalls(model) as found:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return found
