"""Weights that a hook computes before every call, as torch's older reparametrizations do."""

from __future__ import annotations

from contextlib import suppress

from torch import Tensor, nn
from torch.nn.utils import prune, remove_spectral_norm, remove_weight_norm

__all__ = ["remove_weight_hooks", "stores_weight"]


def remove_weight_hooks(module: nn.Module) -> None:
    """Replace what a hook of torch computes by a parameter of the same values, in place.

    The hooks are those of ``weight_norm``, ``spectral_norm`` and pruning in
    :mod:`torch.nn.utils`. In eval mode all of them compute the same weight at every call. Other
    hooks stay.

    Args:
        module: a single layer, in eval mode.
    """
    for remove in (remove_weight_norm, remove_spectral_norm):
        with suppress(ValueError):  # the layer has no such hook
            remove(module)
    masks = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("_mask")]
    for mask in masks:
        with suppress(ValueError):  # a buffer of another kind
            prune.remove(module, mask.removesuffix("_mask"))


def stores_weight(module: nn.Module, weight: Tensor) -> bool:
    """Return True if ``weight`` is a parameter of ``module`` or a view of one.

    A weight that is computed from parameters is not: writing into it would be lost.
    """
    place = weight.untyped_storage().data_ptr()
    return any(place == p.untyped_storage().data_ptr() for p in module.parameters())
