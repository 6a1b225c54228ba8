"""Families whose linear parts are not just the forward with something bypassed."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.fusion.reparam.rule import BlockRule, Merge, main_layer, remove

__all__ = ["GhostV3Rule", "ImplicitHeadRule", "RepGhostRule", "VanillaActivationRule"]


class GhostV3Rule(BlockRule):
    """Two linear parts, each followed by its own activation, that become Sequentials."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """See the class."""
        for part, target in (("primary", "primary_conv"), ("cheap", "cheap_operation")):
            names = [f"{part}_rpr_{kind}" for kind in ("conv", "scale", "skip")]
            branches = [b for name in names if (b := getattr(block, name, None)) is not None]
            flat = [
                b
                for branch in branches
                for b in (branch if isinstance(branch, nn.ModuleList) else [branch])
            ]
            layer = merge(
                lambda x, flat=flat: sum(b(x) for b in flat), main_layer(block, tuple(names))
            )
            setattr(
                block,
                target,
                nn.Sequential(layer.make(), getattr(block, f"{part}_activation", nn.Identity())),
            )
            remove(block, names)
        block.infer_mode = True
        return None


class RepGhostRule(BlockRule):
    """Extra conv-BN branches around a cheap operation."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """See the class."""

        def linear(x: Tensor) -> Tensor:
            extra = [
                norm(conv(x)) for conv, norm in zip(block.fusion_conv, block.fusion_bn, strict=True)
            ]
            return sum(extra, start=block.cheap_operation(x))

        layer = merge(linear, main_layer(block, ("cheap_operation",)))
        block.cheap_operation = layer.make()
        block.fusion_conv, block.fusion_bn = nn.ModuleList(), nn.ModuleList()
        return None


class VanillaActivationRule(BlockRule):
    """relu, depthwise convolution by a parameter of the activation itself, BatchNorm."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """See the class."""
        channels, pad = block.weight.shape[0], (block.weight.shape[-1] - 1) // 2
        layer = merge(
            lambda x: block.bn(F.conv2d(x, block.weight, block.bias, padding=pad, groups=channels)),
            channels=channels,
        ).make()
        remove(block, ["bn", "bias"])
        block.weight, block.bias = layer.weight, layer.bias
        block.deploy = True
        return None


class ImplicitHeadRule(BlockRule):
    """YOLOv7 detection heads: ``im[i] * (m[i](x + ia[i]))`` with learned vectors."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """See the class."""
        for index, layer in enumerate(block.m):
            before, after = block.ia[index], block.im[index]
            merged = merge(lambda x, b=before, a=after, m=layer: a(m(b(x))), layer)
            merged.put_into(layer)
            block.ia[index], block.im[index] = nn.Identity(), nn.Identity()
        return None
