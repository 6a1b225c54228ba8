"""Quantization-aware training of re-parameterisable networks: train the branches, quantize the kernel that is deployed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq import recipes
from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError
from torchq.fusion.modules import block_obstacle
from torchq.fusion.reparam.merged_layer import rank_of
from torchq.fusion.reparam.rule import (
    BLOCKS,
    BlockRule,
    Merge,
    attributes_like,
    find_blocks,
    main_layer,
)
from torchq.nn import Branches, QuantBranches, QuantModule, TensorQuantizer, convert_
from torchq.swap import SwapReport, quantize_
from torchq.swap.decisions import by_rules, decide, patterns
from torchq.utils import Pattern

__all__ = ["BranchReport", "quantize_branches_"]

_LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass(frozen=True)
class BranchReport:
    """What :func:`quantize_branches_` did.

    Attributes:
        blocks: paths of the modules that hold the branches now.
        rest: the report on all other layers; None where there are none.
    """

    blocks: tuple[str, ...]
    rest: SwapReport | None

    def __str__(self) -> str:
        head = f"{len(self.blocks)} blocks train their branches under one quantized kernel: {', '.join(self.blocks)}"
        return head if self.rest is None else f"{head}\n{self.rest}"


class _Placeholder:
    """Stands in for a merged layer while a rule moves a block to its deployed form."""

    geometry = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def make(self) -> nn.Module:
        return self.module


def quantize_branches_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    exclude: Sequence[Pattern] | Pattern | None = None,
) -> BranchReport:
    """Quantize a network whose re-parameterisable blocks still have their branches, for training, in place.

    Each known block (see docs/fuse.md) takes its deployed form, but where the merged convolution would be it has a
    :class:`~torchq.nn.QuantBranches`, which trains the branches and fake-quantizes the equivalent kernel. All other layers are
    swapped as by :func:`torchq.quantize_`. Afterwards: calibrate, train, :func:`torchq.fuse_`. Parameters stay the same objects.

    Args:
        model: not quantized yet.
        config: the rules; a block is decided by the rule for a convolution at the path of its merged layer. Default INT8.
        exclude: as for :func:`torchq.quantize_`; an excluded block keeps its float branches.

    Raises:
        ConfigError: the model has no such block, or a block cannot be trained like this (the text says why).
        QuantizationError: the branches of a block are no linear map that can be followed.
    """
    config = (config or recipes.int8()).with_rules(
        *(Rule(pattern, skip=True) for pattern in patterns(exclude))
    )
    planned = [_prepare(model, path, rule, config) for path, rule in find_blocks(model)]
    if not planned:
        raise ConfigError(
            f"quantize_branches_: {type(model).__name__} has no block with branches; expected RepVGG or the like. Use quantize_"
        )
    for block, rule, wrapper, _ in planned:
        rule.convert(block, lambda function, main=None, wrapper=wrapper: _Placeholder(wrapper))
    config = config.with_rules(
        *(Rule(f"{path}.*", skip=True, optional=True) for _, _, _, path in planned)
    )
    rest = (
        quantize_(model, config)
        if any(not decision.reason for decision in decide(model, config))
        else None
    )
    for _, _, wrapper, path in planned:
        for name, module in wrapper.named_modules():
            if isinstance(module, TensorQuantizer):
                module.name = f"{path}.{name}"
    return BranchReport(
        tuple(path for _, _, wrapper, path in planned if isinstance(wrapper, QuantBranches)), rest
    )


def _prepare(
    model: nn.Module, path: str, rule: BlockRule, config: QuantConfig
) -> tuple[nn.Module, BlockRule, nn.Module, str]:
    """The block, its rule, the module for its branches, and the path of that module; the model is not changed."""
    block = model.get_submodule(path)
    if type(rule) is not BlockRule or rule.writes is None or rule.linear is not None:
        raise ConfigError(
            f"quantize_branches_: {path} is a {rule.name} block; expected one whose branches are one module. Merge it with fuse_ first"
        )
    if (reason := block_obstacle(copy.deepcopy(block).eval())) is not None:
        raise ConfigError(f"quantize_branches_: {path} {reason}")
    main: Any = main_layer(block, rule.branches)
    channels, rank = getattr(main, "in_channels", None) or main.num_features, rank_of(main)
    wrapper: nn.Module = Branches(_linear_part(block, rule), channels, rank)
    target = f"{path}.{rule.writes}".lstrip(".")
    decision = by_rules((target,), _LAYERS[rank](1, 1, 1, device="meta"), config)
    if not decision.reason:
        convert_(wrapper, input=decision.input, weight=decision.weight)
    return block, rule, wrapper, target


def _linear_part(block: nn.Module, rule: BlockRule) -> nn.Module:
    """A second module of the block's class with the same branch objects, and nothing after their sum."""
    own = (*block.children(), *block.parameters(recurse=False), *block.buffers(recurse=False))
    twin = copy.deepcopy(block, {id(part): part for part in own})
    branches = set(attributes_like(block, rule.branches))
    for name, _ in list(block.named_children()):
        if (
            name not in branches
        ):  # what follows the sum stays with the block, and a placeholder for the deployed form is not used yet
            setattr(twin, name, nn.Identity())
    return twin


@dataclass(frozen=True, kw_only=True)
class _DeployRule(BlockRule):
    """Branches -> one convolution with the same quantizers, its kernel computed by the module itself, so that no code changes."""

    def convert(self, block: Any, merge: Merge) -> nn.Module | None:
        layer: Any = merge(block.branches.forward, channels=block.channels, rank=block.rank).make()
        kernel, bias = block.equivalent()
        layer.weight.data, layer.bias.data = kernel.detach(), bias.detach()
        if isinstance(block, QuantModule):
            convert_(layer)
            layer.input_quantizer, layer.weight_quantizer = (
                block.input_quantizer,
                block.weight_quantizer,
            )
        return layer.train(block.training)


BLOCKS.add(
    "trained-branches",
    _DeployRule(
        name="trained-branches",
        branches=("branches",),
        when=lambda m: isinstance(m, Branches),
        quantized=True,
    ),
)
