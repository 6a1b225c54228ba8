"""Comparing and timing networks, for the checks of the sweep."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from benchmarks.zoo_models import call
from torchq.nn import QuantModule

__all__ = [
    "class_of_each_path",
    "decibels",
    "enough_batches",
    "joined",
    "measure",
    "outputs",
    "same",
    "state",
    "verdict",
    "with_rounding",
]

#: Relative change of results that stands for another order of additions.
ROUNDING = 1e-6
#: So many numbers tell two noise powers apart to about 0.6 dB (one standard deviation), if their
#: errors are independent: 10 log10(e) * sqrt(4 / n).
NUMBERS = 200
MOST_BATCHES = 50


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the tensors of the model's result, in a fixed order, with random functions seeded."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # Transformers draws its masks from NumPy.
    with torch.no_grad():
        result = call(model, batch)
    if not isinstance(result, Tensor | tuple | list | dict):
        result = dict(result) if hasattr(result, "keys") else vars(result)
    return [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def enough_batches(example: Any, expected: list[Tensor]) -> list[Any]:
    """Return the example, and other batches of its shapes until they give enough numbers.

    Args:
        example: A batch.
        expected: What a model returns for it.
    """
    sizes = [x.numel() for x in expected if x.is_floating_point() and x.numel()]
    count = min(MOST_BATCHES, -(-NUMBERS // min(sizes, default=NUMBERS)))
    generator = torch.Generator().manual_seed(0)

    def another(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator)
        order = torch.randperm(x.numel(), generator=generator)
        return x.flatten()[order].view_as(x)

    return [example, *(tree_map(another, example) for _ in range(count - 1))]


def joined(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    """Return the outputs for several batches, each output as one vector."""
    results = [outputs(model, batch) for batch in batches]
    return [torch.cat([x.flatten() for x in parts]) for parts in zip(*results, strict=True)]


def with_rounding(model: nn.Module, batch: Any, seed: int) -> list[Tensor]:
    """Return the outputs with the result of every quantized layer changed by a rounding error."""
    generator = torch.Generator().manual_seed(seed)

    def change(module: nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return result * (1 + ROUNDING * torch.randn(result.shape, generator=generator))

    layers = [m for m in model.modules() if isinstance(m, QuantModule) and not m.is_container]
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


def decibels(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the worst ratio of signal to error over the floating-point outputs, at most 200."""
    worst = 200.0
    for x, y in zip(found, expected, strict=True):
        if not y.is_floating_point() or y.numel() == 0:
            continue
        if x.shape != y.shape:
            return float("-inf")  # a detector kept another number of boxes
        signal, error = y.double().square().sum(), (x.double() - y.double()).square().sum()
        if error > 0:
            worst = min(worst, float(10 * torch.log10(signal / error)))
    return round(worst, 1)


def verdict(good: bool, problem: str) -> str:
    """Return ``"ok"`` or the problem."""
    return "ok" if good else problem


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
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a dry run must leave alone: classes, attributes, the contents of containers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (type(module), sorted(vars(module)))
        for key, value in vars(module).items():
            leaves, _ = tree_flatten_with_path(value)
            found[f"{name}.{key}"] = [
                (str(path), id(leaf), checksum(leaf) if isinstance(leaf, Tensor) else 0)
                for path, leaf in leaves
            ]
    return found


def measure(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each call, over rounds that alternate and last 1 s at most."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + 1
    while time.perf_counter() < end or float("inf") in best.values():
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
