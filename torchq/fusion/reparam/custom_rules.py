"""Families whose linear parts are more than the forward with something bypassed."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.fusion.reparam.rule import BlockRule, Merge, main_layer, remove

__all__ = [
    "GhostV3Rule",
    "ImplicitHeadRule",
    "RepGhostRule",
    "VanillaActivationRule",
    "VanillaNetRule",
]


class GhostV3Rule(BlockRule):
    """Two linear parts, each with its own activation behind it, that become Sequentials."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``primary_rpr_*`` and ``cheap_rpr_*`` of ``block``, in place."""
        for part, result in (("primary", "primary_conv"), ("cheap", "cheap_operation")):
            names = [f"{part}_rpr_{kind}" for kind in ("conv", "scale", "skip")]
            branches: list[nn.Module] = []
            for name in names:
                branch = getattr(block, name, None)
                if isinstance(branch, nn.ModuleList):
                    branches.extend(branch)
                elif branch is not None:
                    branches.append(branch)
            layer = merge(
                lambda x, branches=branches: sum(branch(x) for branch in branches),
                main_layer(block, tuple(names)),
            )
            activation = getattr(block, f"{part}_activation", nn.Identity())
            setattr(block, result, nn.Sequential(layer.make(), activation))
            remove(block, names)
        block.infer_mode = True
        return None


class RepGhostRule(BlockRule):
    """Extra branches of convolution and BatchNorm around a cheap operation."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``fusion_conv`` and ``fusion_bn`` into ``cheap_operation``, in place."""

        def linear(x: Tensor) -> Tensor:
            pairs = zip(block.fusion_conv, block.fusion_bn, strict=True)
            extra = [norm(conv(x)) for conv, norm in pairs]
            return sum(extra, start=block.cheap_operation(x))

        layer = merge(linear, main_layer(block, ("cheap_operation",)))
        block.cheap_operation = layer.make()
        block.fusion_conv, block.fusion_bn = nn.ModuleList(), nn.ModuleList()
        return None


class VanillaActivationRule(BlockRule):
    """A relu, a depthwise convolution by a parameter of the activation itself, a BatchNorm."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``bn`` into ``weight`` and ``bias`` of ``block``, in place."""
        channels, pad = block.weight.shape[0], (block.weight.shape[-1] - 1) // 2

        def linear(x: Tensor) -> Any:
            return block.bn(F.conv2d(x, block.weight, block.bias, padding=pad, groups=channels))

        layer = merge(linear, in_channels=channels).make()
        remove(block, ["bn", "bias"])
        block.weight, block.bias = layer.weight, layer.bias
        block.deploy = True
        return None


class VanillaNetRule(BlockRule):
    """A stem and a classifier of two convolutions each, which merge where the slope between is 1.

    The blocks in the middle have a rule of their own.
    """

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``stem1`` and ``stem2``, ``cls1`` and ``cls2`` of ``block``, in place."""
        conv, norm, activation = block.stem2
        pool, dropout, *classifier = block.cls1

        def stem(x: Tensor) -> Any:
            return norm(conv(F.leaky_relu(block.stem1(x), block.act_learn)))

        def classify(x: Tensor) -> Any:
            return block.cls2(F.leaky_relu(nn.Sequential(*classifier)(x), block.act_learn))

        first, last = merge(stem, block.stem1[0]), merge(classify, classifier[0])
        remove(block, ["stem1", "stem2", "cls1", "cls2"])
        block.stem = nn.Sequential(first.make(), activation)
        block.cls = nn.Sequential(pool, dropout, last.make())
        block.deploy = True
        return None


class ImplicitHeadRule(BlockRule):
    """YOLOv7 detection heads: ``im[i] * (m[i](x + ia[i]))`` with learned vectors."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        """Merge ``ia`` and ``im`` into ``m``, in place."""
        for index, layer in enumerate(block.m):
            before, after = block.ia[index], block.im[index]
            merged = merge(lambda x, b=before, a=after, m=layer: a(m(b(x))), layer)
            merged.put_into(layer)
            block.ia[index], block.im[index] = nn.Identity(), nn.Identity()
        return None
