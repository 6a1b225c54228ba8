"""Helpers on :class:`torch.nn.Module`: its device, its paths, its wrappers, temporary modes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

__all__ = [
    "deployed_part",
    "device_of",
    "evaluating",
    "plain_attention",
    "set_submodule",
    "twin_of",
    "unwrapped",
]


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


@contextmanager
def plain_attention() -> Iterator[None]:
    """Run attention operator by operator inside the ``with`` block.

    The fused kernel has no ONNX form, and it reads weights without their quantizers.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside wrappers of torch, which have no computation of their own.

    These are ``DataParallel``, ``DistributedDataParallel``, ``AveragedModel``, and what
    ``torch.compile`` and ``checkpoint_wrapper`` return, also one around another.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> unwrapped(torch.nn.DataParallel(layer)) is layer
        True
        >>> unwrapped(layer) is layer
        True
    """
    if isinstance(model, (nn.DataParallel, DistributedDataParallel, AveragedModel)):
        return unwrapped(model.module)
    if type(model).__name__ in ("OptimizedModule", "CheckpointWrapper"):
        return unwrapped(next(model.children()))
    return model


def deployed_part(model: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the first module that ``deploy`` made in a model, behind its path; None without one.

    Its class is told by where it is defined, since the layers that make it are above all users.
    """
    for name, module in model.named_modules():
        if type(module).__module__.startswith(("torchq.lowering.", "torchq.engines.")):
            return name or "(root)", module
    return None
