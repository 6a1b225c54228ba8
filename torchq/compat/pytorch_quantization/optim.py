"""Parameter groups by name, and weights quantized in place."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchq.compat.errors import LegacyTypeError


def match_parameters(
    model: nn.Module, patterns: Sequence[str]
) -> Iterator[nn.Parameter]:
    """Yield each parameter whose name contains a match of any of the regular expressions, once."""
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            yield parameter


def group_parameters(
    model: nn.Module,
    patterns_list: Sequence[list[str]],
    lrs: Sequence[float] | None = None,
    momentums: Sequence[float] | None = None,
    weight_decays: Sequence[float] | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups, one for each list of patterns, with a value of each option given.

    Their ``params`` are iterators that can be read once, which an optimizer does.
    """
    for patterns in patterns_list:
        if not isinstance(patterns, list):
            raise LegacyTypeError(
                f"patterns_list must be list of list of patterns: got {patterns!r}; "
                f"expected [{patterns!r}]"
            )
    groups: list[dict[str, Any]] = [
        {"params": match_parameters(model, patterns)} for patterns in patterns_list
    ]
    options = {"lr": lrs, "momentum": momentums, "weight_decay": weight_decays}
    for key, values in options.items():
        if values is not None and len(values) != len(groups):
            raise LegacyTypeError(
                f"len({key}s) must match len(patterns_list): got {len(values)}; "
                f"expected {len(groups)}"
            )
        for group, value in zip(groups, values or (), strict=False):
            group[key] = value
    return groups


def freeze_parameters(model: nn.Module, patterns: Sequence[str]) -> None:
    """Turn off the gradient of the parameters that :func:`match_parameters` yields."""
    for parameter in match_parameters(model, patterns):
        parameter.requires_grad = False


def quant_weight_inplace(model: nn.Module) -> None:
    """Replace every weight with a ``_weight_quantizer`` by its quantized values, in place.

    Relax-and-round training calls this function.
    """
    for module in model.modules():
        quantizer = getattr(module, "_weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if quantizer is not None and isinstance(weight, torch.Tensor):
            weight.data.copy_(quantizer(weight))
