"""Make networks smaller without another architecture: fewer repeated blocks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

__all__ = ["shortened"]

KEPT = 2
CONTAINERS = (nn.Sequential, nn.ModuleList)  # A subclass may have code of its own.


def shortened(model: nn.Module, *example: Any) -> nn.Module:
    """Return a copy whose repeated blocks are cut to two, or the model if that does not run.

    Blocks repeat where neighbours in a ``Sequential`` or ``ModuleList`` have the same class and
    parameters of the same shapes. What the first two compute, the others compute too.

    Args:
        model: A network in eval mode.
        example: Its positional arguments.
    """
    small = copy.deepcopy(model)
    for parent in small.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Sequential | nn.ModuleList) and type(child) in CONTAINERS:
                setattr(parent, name, _cut(child))
    try:
        with torch.no_grad():
            results = [tree_leaves(network(*example)) for network in (small, model)]
    except Exception:  # Something counts the blocks.
        return model
    shapes = [[getattr(leaf, "shape", None) for leaf in leaves] for leaves in results]
    return small if shapes[0] == shapes[1] else model


def _cut(blocks: nn.Sequential | nn.ModuleList) -> nn.Module:
    """Return the container without the third and further blocks of each run of equal ones."""
    kept: dict[str, nn.Module] = {}
    previous, length = None, 0
    for name, block in blocks.named_children():
        kind = (type(block), [parameter.shape for parameter in block.parameters()])
        length = length + 1 if kind == previous and kind[1] else 1
        previous = kind
        if length <= KEPT:
            kept[name] = block
    if len(kept) == len(blocks):
        return blocks
    if isinstance(blocks, nn.ModuleList):
        return nn.ModuleList(kept.values())
    return nn.Sequential(*kept.values())
