"""Helpers on :class:`torch.nn.Module`: its device, its paths, temporary training modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

__all__ = ["device_of", "evaluating", "set_submodule", "twin_of"]


def device_of(model: nn.Module) -> torch.device | None:
    """Return the device of the first parameter or buffer of ``model``; None where it has none."""
    return next((t.device for t in (*model.parameters(), *model.buffers())), None)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in eval mode; at the end give every module its own mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def set_submodule(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` at the dotted ``path`` below ``model``, which cannot be ``model`` itself."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def twin_of(module: nn.Module) -> nn.Module:
    """Return a second object that has the attributes, hooks and children of ``module``.

    What is added to one of the two later does not appear in the other.
    """
    twin = copy.copy(module)
    vars(twin).update(
        {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)}
    )
    return twin
