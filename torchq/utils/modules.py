"""Small helpers on :class:`torch.nn.Module`: paths and temporary training modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating", "set_submodule", "twin_of"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put ``model`` in eval mode; give every module its own mode back at the end, also after an exception."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def set_submodule(model: nn.Module, path: str, new: nn.Module) -> None:
    """Put ``new`` at the dotted ``path`` below ``model``. The root itself cannot be replaced."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, new)


def twin_of(module: nn.Module) -> nn.Module:
    """A second object with the attributes, hooks and children of ``module``; adding to one does not add to the other."""
    twin = copy.copy(module)
    vars(twin).update(
        {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)}
    )
    return twin
