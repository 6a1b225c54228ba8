"""BatchNorm that stays in eval mode whatever ``model.train()`` says."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from torchq.nn.convert import QuantModule, change_class, quantized_class

M = TypeVar("M", bound="_Frozen")


class _Frozen(nn.Module):
    def train(self: M, mode: bool = True) -> M:
        """Stay in eval mode: running statistics are used and do not change."""
        return super().train(False)


def _frozen(norm: type[nn.Module]) -> type[nn.Module]:
    """Return the frozen class of a norm, under its name in this module, where pickles find it."""
    doc = f":class:`torch.nn.{norm.__name__}` with fixed statistics; see :func:`freeze_norm_`."
    return type(
        f"Frozen{norm.__name__}",
        (_Frozen, norm),
        {"__doc__": doc, "__module__": __name__},
    )


FrozenBatchNorm1d = _frozen(nn.BatchNorm1d)
FrozenBatchNorm2d = _frozen(nn.BatchNorm2d)
FrozenBatchNorm3d = _frozen(nn.BatchNorm3d)
FrozenSyncBatchNorm = _frozen(nn.SyncBatchNorm)
_THAWED = {
    frozen: frozen.__bases__[1]
    for frozen in (
        FrozenBatchNorm1d,
        FrozenBatchNorm2d,
        FrozenBatchNorm3d,
        FrozenSyncBatchNorm,
    )
}
#: Float class -> frozen class; exact types only.
FROZEN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    n: f for f, n in _THAWED.items()
}


def freeze_norm_(module: nn.Module) -> bool:
    """Freeze one BatchNorm layer, in place.

    Example:
        >>> norm = torch.nn.BatchNorm2d(3)
        >>> freeze_norm_(norm), norm.train().training
        (True, False)
    """
    if not _change_norm_(module, FROZEN_NORMS):
        return False
    module.train(False)
    return True


def unfreeze_norm_(module: nn.Module, training: bool) -> bool:
    """Make a frozen BatchNorm layer an ordinary one again, in place."""
    if not _change_norm_(module, _THAWED):
        return False
    module.train(training)
    return True


def thawed(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a BatchNorm that a frozen one was; any other class as it is."""
    return _THAWED.get(cls, cls)


def _change_norm_(
    module: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]
) -> bool:
    """Give a norm, or one with a quantized result, the class that a table has for it."""
    cls = classes.get(type(module))
    if isinstance(module, QuantModule):
        in_float = classes.get(type(module).float_class)
        cls = None if in_float is None else quantized_class(in_float)
    if cls is None:
        return False
    change_class(module, cls)
    return True
