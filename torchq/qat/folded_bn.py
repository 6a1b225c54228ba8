"""Training with BatchNorm folded into the convolutions, and the folded weights quantized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError
from torchq.fusion import FoldedConv
from torchq.fusion.batchnorm.flow import find_flow
from torchq.fusion.batchnorm.pairs import find_pairs
from torchq.nn import TensorQuantizer, convert_
from torchq.nn.transaction import unchanged_on_error
from torchq.qat.reparam import BranchReport
from torchq.swap import quantize_
from torchq.swap.decisions import (
    by_rules,
    config_or_default,
    decide,
    patterns,
    resolve_positions,
)
from torchq.utils import Pattern, evaluating, set_submodule

__all__ = ["quantize_folded_"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def quantize_folded_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    example: Any = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
) -> BranchReport:
    """Quantize for training with BatchNorms folded into their convolutions, in place.

    A :class:`torchq.nn.QuantFoldedConv` stands in the place of each convolution with a BatchNorm
    behind it; all other layers are swapped as by :func:`torchq.quantize_`. Afterwards: calibrate,
    train, :func:`torchq.fuse_`, which changes no code. Parameters stay the same objects.

    This is for weights with one range for several channels. With a range per output channel the
    BatchNorm scales weight and range alike, so plain training computes the same, in half the time.

    Args:
        model: not quantized yet.
        config: the rules, which name the convolution by its path. Default INT8.
        example: one input for models that torch.fx cannot trace; as for :func:`torchq.fuse_`.
        exclude: as for :func:`torchq.quantize_`.

    Returns:
        The report; its blocks are the folded convolutions.

    Raises:
        ConfigError: no convolution that the rules select has a BatchNorm behind it. A call that
            fails leaves the model as it was.
    """
    skips = (Rule(pattern, skip=True) for pattern in patterns(exclude))
    config = config_or_default(config).with_rules(*skips)
    config = resolve_positions(model, config)
    with evaluating(model):
        pairs, _ = find_pairs(model, find_flow(model, example)[0])
    plain = [(pair.layers[0], pair.norm) for pair in pairs if not pair.before]
    with unchanged_on_error(model):
        folded = [path for path, norm in plain if _fold(model, path, norm, config)]
        if not folded:
            raise ConfigError(
                f"quantize_folded_: {type(model).__name__} has no convolution with a BatchNorm "
                "behind it that a rule selects; expected at least one. Use quantize_"
            )
        rest = config.with_rules(*(Rule(f"{p}.*", skip=True, optional=True) for p in folded))
        left = any(not decision.reason for decision in decide(model, rest))
        report = quantize_(model, rest) if left else None
        for path in folded:
            for name, module in model.get_submodule(path).named_modules():
                if isinstance(module, TensorQuantizer):
                    module.name = f"{path}.{name}"
    return BranchReport(tuple(folded), report)


def _fold(model: nn.Module, path: str, norm: str, config: QuantConfig) -> bool:
    """Fold one pair where the rules quantize its convolution; return True if they do."""
    layer = model.get_submodule(path)
    decision = by_rules((path,), layer, config)
    if type(layer) not in _CONVOLUTIONS or decision.reason:
        return False
    batchnorm = model.get_submodule(norm)
    folded = FoldedConv(layer, batchnorm)
    convert_(folded, input=decision.input, weight=decision.weight)
    set_submodule(model, path, folded)
    set_submodule(model, norm, nn.Identity().train(batchnorm.training))
    return True
