"""BatchNorm that stays in eval mode whatever ``model.train()`` says."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from torchq.nn.convert import change_class

M = TypeVar("M", bound="_Frozen")


class _Frozen(nn.Module):
    def train(self: M, mode: bool = True) -> M:
        """Stay in eval mode: running statistics are used and do not change."""
        return super().train(False)


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` with fixed statistics; see :func:`freeze_norm_`."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` with fixed statistics; see :func:`freeze_norm_`."""


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` with fixed statistics; see :func:`freeze_norm_`."""


class FrozenSyncBatchNorm(_Frozen, nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` with fixed statistics; see :func:`freeze_norm_`."""


#: Float class -> frozen class; exact types only.
FROZEN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
    nn.SyncBatchNorm: FrozenSyncBatchNorm,
}
_THAWED = {frozen: norm for norm, frozen in FROZEN_NORMS.items()}


def freeze_norm_(module: nn.Module) -> bool:
    """Freeze one BatchNorm layer, in place.

    Example:
        >>> norm = torch.nn.BatchNorm2d(3)
        >>> freeze_norm_(norm), norm.train().training
        (True, False)
    """
    frozen = FROZEN_NORMS.get(type(module))
    if frozen is None:
        return False
    change_class(module, frozen)
    module.train(False)
    return True


def unfreeze_norm_(module: nn.Module, training: bool) -> bool:
    """Make a frozen BatchNorm layer an ordinary one again, in place."""
    norm = _THAWED.get(type(module))
    if norm is None:
        return False
    change_class(module, norm)
    module.train(training)
    return True
