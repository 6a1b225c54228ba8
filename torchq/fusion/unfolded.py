"""Which layers keep a BatchNorm behind them, as ``fuse_`` refused to fold it.

Planning takes each BatchNorm that the structure lets ``fuse_`` fold for folded. Numbers may forbid
it all the same, which is known once ``fuse_`` has tried.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

#: The attribute that a layer has in front of such a BatchNorm.
_ATTRIBUTE = "_torchq_keeps_norm"


def keeps_norm(layer: nn.Module) -> bool:
    """Return True for a layer whose BatchNorm ``fuse_`` refused to fold when it was called last."""
    return _ATTRIBUTE in vars(layer)


def keep_norms_(model: nn.Module, layers: Iterable[str]) -> None:
    """Note behind which layers of a model, and no others, ``fuse_`` refused to fold a BatchNorm.

    Args:
        model: its modules get or lose an attribute; nothing that they compute changes.
        layers: their paths.
    """
    for module in model.modules():
        vars(module).pop(_ATTRIBUTE, None)
    for path in layers:
        vars(model.get_submodule(path))[_ATTRIBUTE] = True
