"""Comparing networks, and counting the products with weights that they compute.

The count does not rely on torchq's own report: it watches the operators that torch dispatches. A
tensor is a weight if it was computed from parameters and constants alone. A weight is quantized if
it lies on an INT8 grid, per tensor or per slice of one axis.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from benchmarks.harness import decibels
from benchmarks.zoo_models import call
from torchq.nn import QuantModule

#: Relative change of results that stands for another order of additions.
ROUNDING = 1e-6


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the tensors of the model's result, in a fixed order, with random functions seeded."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # Transformers draws its masks from NumPy.
    with torch.no_grad():
        result = call(model, batch)
    if not isinstance(result, Tensor | tuple | list | dict):
        result = dict(result) if hasattr(result, "keys") else vars(result)
    return [
        leaf.detach().clone()
        for leaf in tree_leaves(result)
        if isinstance(leaf, Tensor)
    ]


def with_rounding(model: nn.Module, batch: Any, seed: int) -> list[Tensor]:
    """Return the outputs with the result of every quantized layer changed by a rounding error."""
    generator = torch.Generator().manual_seed(seed)

    def change(module: nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return result * (1 + ROUNDING * torch.randn(result.shape, generator=generator))

    layers = [
        m for m in model.modules() if isinstance(m, QuantModule) and not m.is_container
    ]
    hooks = [layer.register_forward_hook(change) for layer in layers]
    try:
        return outputs(model, batch)
    finally:
        for hook in hooks:
            hook.remove()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if all tensors are equal bit for bit; NaN equals NaN."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        if x.is_floating_point()
        else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def worst_decibels(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the worst ratio of signal to error over the floating-point outputs, at most 200."""
    worst = 200.0
    for x, y in zip(found, expected, strict=True):
        if not y.is_floating_point() or y.numel() == 0:
            continue
        if x.shape != y.shape:
            return float("-inf")  # a detector kept another number of boxes
        worst = min(worst, decibels(x, y))
    return worst


def class_of_each_path(model: nn.Module) -> dict[str, tuple[type, bool]]:
    """Return the class at each path of the module tree, shared modules under all their paths.

    A graph of torch.fx, and a module with parametrizations, has a class of its own, which is made
    anew: its base counts, and whether there are parametrizations.
    """

    def kind(module: nn.Module) -> type:
        is_graph = isinstance(module, fx.GraphModule)
        return fx.GraphModule if is_graph else type_before_parametrizations(module)

    return {
        name: (kind(module), is_parametrized(module))
        for name, module in model.named_modules(remove_duplicate=False)
    }


def checksum(tensor: Tensor) -> int:
    """Return a number that tells the values of a dense tensor on the CPU from other ones."""
    return zlib.crc32(
        tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data
    )


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a dry run must leave alone: classes, attributes, the contents of containers."""
    by_path: dict[str, Any] = {}
    for name, module in model.named_modules():
        by_path[name] = (type(module), sorted(vars(module)))
        for key, value in vars(module).items():
            leaves, _ = tree_flatten_with_path(value)
            by_path[f"{name}.{key}"] = [
                (str(path), id(leaf), checksum(leaf) if isinstance(leaf, Tensor) else 0)
                for path, leaf in leaves
            ]
    return by_path


# --- products with weights ------------------------------------------------------------------------

PRODUCTS = {
    "convolution",
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "linear",
    "_trilinear",
    "mkldnn_linear",
}
TOLERANCE = (
    1e-3  # of a code; float32 rounding of scale and quotient is below 1e-4 for 8 bits
)


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
        self._computed = _Storages(())
        #: Quantizers keep scales from call to call, of which a weight has one for a channel.
        self._most_scales = max(
            (d for p in model.parameters() for d in p.shape), default=1
        )

    def _is_constant(self, x: Tensor) -> bool:
        """Return True for what was made of nothing, and for scales that were there before."""
        is_kept = x not in self._computed and x.numel() <= self._most_scales
        return is_kept or x in self._constants

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, count it, and note what its results were computed from."""
        kwargs = kwargs or {}
        inputs = list(_tensors((args, kwargs)))
        if function.overloadpacket.__name__ in PRODUCTS:
            self._count([x for x in inputs if x in self._weights and x.dim() > 1])
        kinds = [(x in self._weights, self._is_constant(x)) for x in inputs]
        result = function(*args, **kwargs)
        for output in _tensors(result):
            self._weights.discard(output)
            self._constants.discard(output)
            if not kinds and "rand" not in function.overloadpacket.__name__:
                self._constants.add(output)
            elif kinds and all(weight or constant for weight, constant in kinds):
                (self._weights if any(w for w, _ in kinds) else self._constants).add(
                    output
                )
            else:
                self._computed.add(output)
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
        with torch.no_grad(), WeightCalls(model) as calls:
            run()
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    return calls
