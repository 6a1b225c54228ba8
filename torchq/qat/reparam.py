"""Quantization-aware training of re-parameterisable networks.

The branches are trained, and the kernel that is deployed is quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError, FuseError, QuantizationError
from torchq.fusion import BlockRule, find_blocks
from torchq.fusion.modules import block_obstacle
from torchq.fusion.record import recording
from torchq.fusion.reparam.branches import BranchesEdit, branches_of, has_one_linear_part
from torchq.nn import QuantBranches, TensorQuantizer, convert_
from torchq.nn.transaction import unchanged_on_error
from torchq.swap import SwapReport, quantize_
from torchq.swap.decisions import (
    by_rules,
    config_or_default,
    decide,
    patterns,
    resolve_positions,
)
from torchq.utils import NotebookText, Pattern, copy_module

__all__ = ["BranchReport", "quantize_branches_"]

_LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


@dataclass(frozen=True)
class BranchReport(NotebookText):
    """The result of :func:`quantize_branches_`.

    Attributes:
        blocks: paths of the modules that hold the branches now.
        rest: the report on all other layers; None where there are none.
    """

    blocks: tuple[str, ...]
    rest: SwapReport | None

    def __str__(self) -> str:
        """Return one line, and the report on all other layers."""
        blocks = ", ".join(self.blocks)
        head = (
            f"{len(self.blocks)} blocks train their branches under one quantized kernel: {blocks}"
        )
        return head if self.rest is None else f"{head}\n{self.rest}"


def quantize_branches_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    exclude: Sequence[Pattern] | Pattern | None = None,
) -> BranchReport:
    """Quantize for training a network whose blocks still have their branches, in place.

    Each known block (see docs/fuse.md) is brought into its deployed form, but a
    :class:`~torchq.nn.QuantBranches` stands where the merged convolution would be: it trains the
    branches and fake-quantizes the equivalent kernel. All other layers are swapped as by
    :func:`torchq.quantize_`. Afterwards: calibrate, train, :func:`torchq.fuse_`. Parameters stay
    the same objects. A call that fails leaves the model as it was.

    Args:
        model: not quantized yet.
        config: the rules; a block is decided by the rule for a convolution at the path of its
            merged layer. Default INT8.
        exclude: as for :func:`torchq.quantize_`; an excluded block keeps its float branches.

    Returns:
        The report.

    Raises:
        ConfigError: the model has no such block, or a block cannot be trained like this (the text
            says why).
        QuantizationError: the branches of a block are no linear map that can be followed.
    """
    config = config_or_default(config).with_rules(
        *(Rule(pattern, skip=True) for pattern in patterns(exclude))
    )
    blocks = find_blocks(model)
    merged = {path: _layer_path(path, rule) for path, rule in blocks}
    config = resolve_positions(model, config, merged=merged)
    edits = [_prepare(model, path, rule, config) for path, rule in blocks]
    if not edits:
        raise ConfigError(
            f"quantize_branches_: {type(model).__name__} has no block with branches; expected"
            " RepVGG or the like. Use quantize_"
        )
    with unchanged_on_error(model):
        with recording(model, [edit.record() for edit in edits]):
            for edit in edits:
                edit.apply(model)
        config = config.with_rules(
            *(Rule(f"{_target(edit)}.*", skip=True, optional=True) for edit in edits)
        )
        left = any(not decision.reason for decision in decide(model, config))
        rest = quantize_(model, config) if left else None
    for edit in edits:
        for name, module in edit.branches.named_modules():
            if isinstance(module, TensorQuantizer):
                module.name = f"{_target(edit)}.{name}"
    quantized = [edit for edit in edits if isinstance(edit.branches, QuantBranches)]
    return BranchReport(tuple(map(_target, quantized)), rest)


def _target(edit: BranchesEdit) -> str:
    """Return the path at which the branches of a block are placed."""
    return _layer_path(edit.path, edit.rule)


def _layer_path(path: str, rule: BlockRule) -> str:
    """Return the path of the layer that a block becomes."""
    return f"{path}.{rule.writes}".lstrip(".")


def _prepare(model: nn.Module, path: str, rule: BlockRule, config: QuantConfig) -> BranchesEdit:
    """Return the change of one block, with quantizers where the rules ask for them.

    The model is not changed.
    """
    block = model.get_submodule(path)
    if not has_one_linear_part(rule):
        raise ConfigError(
            f"quantize_branches_: {path} is a {rule.name} block; expected one whose branches are"
            " one module. Merge it with fuse_ first"
        )
    if (reason := block_obstacle(copy_module(block).eval())) is not None:
        raise ConfigError(f"quantize_branches_: {path} {reason}")
    try:
        branches = branches_of(block, rule)
    except FuseError as reason:
        raise QuantizationError(str(reason)) from None
    edit = BranchesEdit(path, rule, branches)
    layer = _LAYERS[branches.spatial_dims](1, 1, 1, device="meta")
    decision = by_rules((_target(edit),), layer, config)
    if not decision.reason:
        convert_(branches, input=decision.input, weight=decision.weight)
    return edit
