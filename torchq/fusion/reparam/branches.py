"""Parallel linear branches as one module that knows the one convolution it amounts to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchq.errors import FuseError
from torchq.fusion import schema
from torchq.fusion.linear_map.symbolic import Geometry, NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor
from torchq.fusion.modules import spatial_dims_of
from torchq.fusion.reparam.blocks import known_block_at
from torchq.fusion.reparam.rule import BlockRule, attributes_like, main_layer
from torchq.utils import copy_module, evaluating

__all__ = [
    "Branches",
    "BranchesEdit",
    "branches_from_record",
    "branches_of",
    "has_one_linear_part",
]


class Branches(nn.Module):
    """The linear part of a re-parameterisable block, before its branches are merged.

    Args:
        branches: a module whose forward is one linear, shift-invariant map of a feature map, such
            as a sum of branches of convolution and BatchNorm.
        in_channels: the number of channels of its input.
        spatial_dims: the number of spatial dimensions, 1 to 3.

    Raises:
        FuseError: ``branches`` is not a linear, shift-invariant map, or its kernel cannot be
            derived symbolically (:func:`torchq.fuse_` can also read it from gradients).
    """

    def __init__(self, branches: nn.Module, in_channels: int, spatial_dims: int) -> None:
        super().__init__()
        self.branches = branches
        self.in_channels, self.spatial_dims = in_channels, spatial_dims
        self.train(branches.training)
        self.geometry: Geometry = self._collapse({})[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the branches on ``x`` of shape ``(N, in_channels, *spatial)``."""
        out = self.branches(x)
        assert isinstance(out, Tensor)
        return out

    def equivalent(self, statistics: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Return kernel and bias of the equivalent convolution, differentiably.

        Args:
            statistics: BatchNorm statistics by buffer name below ``branches``; default the
                running ones.

        Returns:
            ``(out_channels, in_channels / groups, *window)`` and ``(out_channels,)``, in the
            dtype of the branches.
        """
        dtype = next((p.dtype for p in self.branches.parameters()), torch.float32)
        _, (kernel, bias) = self._collapse(statistics or {})
        return kernel.to(dtype), bias.to(dtype)

    def merge_into(self, layer: nn.Module) -> nn.Module:
        """Return ``layer``, a convolution of :attr:`geometry`, with the equivalent kernel in it."""
        kernel, bias = self.equivalent()
        target: Any = layer
        target.weight.data, target.bias.data = kernel.detach(), bias.detach()
        return layer.train(self.training)

    def _collapse(self, statistics: dict[str, Tensor]) -> tuple[Geometry, tuple[Tensor, Tensor]]:
        tensors = (*self.branches.parameters(), *self.branches.buffers())
        device = next((tensor.device for tensor in tensors), None)
        source: Any = AffineTensor.identity(object(), self.in_channels, self.spatial_dims, device)
        name = type(self.branches).__name__
        try:
            with evaluating(self.branches):
                result = functional_call(self.branches, statistics, (source,))
        except NotAffine as reason:
            raise FuseError(
                f"{name}: {reason}; expected a sum of linear branches. Merge it with fuse_"
            ) from None
        if not isinstance(result, AffineTensor):
            raise FuseError(
                f"{name}: returns {type(result).__name__}; expected one map of its input"
            )
        return result.symmetric()

    def extra_repr(self) -> str:
        """Return the equivalent convolution for ``repr``."""
        g = self.geometry
        return (
            f"{g.in_channels}, {g.out_channels}, kernel_size={g.window}, stride={g.stride},"
            f" padding={g.before}, groups={g.groups}"
        )


class _Placeholder:
    """A stand-in for the merged layer while a rule brings a block into its deployed form."""

    geometry = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def make(self) -> nn.Module:
        return self.module


@dataclass(frozen=True)
class BranchesEdit:
    """The deployed form of a block, with :class:`Branches` where the merged layer would be.

    Attributes:
        path: where the block is.
        rule: the block's family.
        branches: what is written to ``rule.writes``; parameters stay those of the block.
    """

    path: str
    rule: BlockRule
    branches: Branches

    def apply(self, model: nn.Module) -> None:
        """Change the block at the path of ``model``, which is the model that was planned on."""
        block = model.get_submodule(self.path)
        self.rule.convert(block, lambda *args, **kwargs: _Placeholder(self.branches))

    def record(self) -> dict[str, Any]:
        """Return the structure of the change, as JSON data."""
        return {"kind": "branches", "path": self.path, "family": self.rule.name}


def branches_of(block: nn.Module, rule: BlockRule) -> Branches:
    """Return the branches of ``block`` as one module; the block is not changed.

    Args:
        block: a block of the family of ``rule``.
        rule: a rule with ``writes`` and without ``linear``.

    Raises:
        FuseError: the branches are not one linear map that can be derived symbolically.
    """
    main: Any = main_layer(block, rule.branches)
    channels = getattr(main, "in_channels", None) or main.num_features
    return Branches(_linear_part(block, rule), channels, spatial_dims_of(main))


def _linear_part(block: nn.Module, rule: BlockRule) -> nn.Module:
    """Return a module of the block's class with the same branches and nothing behind them."""
    own = (*block.children(), *block.parameters(recurse=False), *block.buffers(recurse=False))
    twin = copy_module(block, sharing=own)
    branches = set(attributes_like(block, rule.branches))
    for name, _ in list(block.named_children()):
        if (
            name not in branches
        ):  # it stays with the block, or is a placeholder of the deployed form
            setattr(twin, name, nn.Identity())
    return twin


def has_one_linear_part(rule: BlockRule) -> bool:
    """Return True if blocks of the family can be trained as :class:`Branches`."""
    return type(rule) is BlockRule and rule.writes is not None and rule.linear is None


def branches_from_record(model: nn.Module, record: Mapping[str, Any]) -> BranchesEdit:
    """Return the change that :meth:`BranchesEdit.record` describes.

    Args:
        model: left unchanged.
        record: an entry of :func:`torchq.fusion.fusion_record`.

    Raises:
        ConfigError: the entry is damaged, or its family is not registered.
        FuseError: ``model`` has no such block.
    """
    schema.expect_keys(record, "kind", "path", "family")
    block, rule = known_block_at(model, record)
    if not has_one_linear_part(rule):
        raise schema.damaged(record, "family", "a family whose branches are one linear part")
    return BranchesEdit(record["path"], rule, branches_of(block, rule))
