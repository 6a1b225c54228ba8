"""The formats that a layer may have, and a calibrated copy of the model in each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq import recipes
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.nn import shared_groups
from torchq.swap import Decision, quantize_
from torchq.utils import Pattern, copy_module
from torchq.workflow.calibrate import calibrate

__all__ = [
    "FLOAT",
    "Candidate",
    "FormatChoice",
    "check_formats",
    "exact_rule",
    "make_candidate",
    "named_config",
]

#: The name of the choice that leaves a layer as it is.
FLOAT = "float"

#: A name such as "w4a8", "w4" or "int8", an integer width, or a pair of widths, or a config.
FormatChoice = str | int | tuple[int | None, int | None] | QuantConfig

_WIDTHS = re.compile(r"w(\d+)(?:a(\d+))?")


@dataclass(frozen=True)
class Candidate:
    """A whole model in one format.

    Attributes:
        name: of the format.
        model: a calibrated copy.
        decisions: path of each layer -> what was decided about it.
        shared: groups of layers that share a quantizer.
    """

    name: str
    model: nn.Module
    decisions: dict[str, Decision]
    shared: tuple[tuple[str, ...], ...]


def check_formats(choices: Sequence[FormatChoice]) -> None:
    """Raise an error unless every choice is known, and one of them is a format of integers.

    Raises:
        ConfigError: One is not, or all leave the layers float.
    """
    found = [named_config(choice) for choice in choices if choice != FLOAT]
    if not found:
        raise ConfigError("mixed_precision: got no formats; expected one at least, such as [4, 8]")


def named_config(choice: FormatChoice) -> tuple[str, QuantConfig]:
    """Return the name and the recipe of a format.

    Args:
        choice: ``"w4a8"``: weights of 4 and inputs of 8 bits; ``"w4"``: weights alone; the name of
            a recipe; a width for both; a pair of widths, of which None leaves that part float; or
            a config of one's own.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(choice, QuantConfig):
        return choice.name, choice
    if isinstance(choice, str):
        found = _WIDTHS.fullmatch(choice)
        # The recipe called w4a4 has other first and last layers; here a layer has its own format.
        if found is None:
            return choice, recipes.by_name(choice)
        widths = int(found[1]), None if found[2] is None else int(found[2])
    elif isinstance(choice, int):
        widths = choice, choice
    elif isinstance(choice, tuple) and len(choice) == 2:
        widths = choice  # type: ignore[assignment]
    else:
        raise ConfigError(
            f"mixed_precision: got format {choice!r}; expected a name such as 'w4a8', a recipe, a "
            "width, a pair of widths or a QuantConfig"
        )
    config = recipes.integer(*widths)
    return config.name, config


def make_candidate(
    model: nn.Module,
    choice: FormatChoice,
    batches: Iterable[Any],
    example: Any,
    *,
    exclude: Sequence[Pattern] | Pattern | None,
    forward: Forward | None,
    group: dist.ProcessGroup | None = None,
) -> Candidate:
    """Return a copy of a float model in one format, calibrated.

    Args:
        model: left unchanged.
        choice: see :func:`named_config`.
        batches: to calibrate on.
        example: the first of them.
        exclude: layers that stay float.
        forward: the user's own way to run the model.
        group: processes with batches of their own.
    """
    name, config = named_config(choice)
    quantized = copy_module(model)
    example = None if forward is not None else example
    report = quantize_(quantized, config, exclude=exclude, example=example, progress=False)
    calibrate(quantized, batches, forward=forward, on_unseen="dynamic", group=group, progress=False)
    decisions = {d.name: d for d in report.replaced if d.input or d.weight}
    shared = [tuple(path.rpartition(".")[0] for path in g) for g in shared_groups(quantized)]
    return Candidate(name, quantized, decisions, tuple(shared))


def exact_rule(name: str, input: QuantDescriptor | None, weight: QuantDescriptor | None) -> Rule:
    """Return a rule for one module alone; without descriptors it stays float."""
    plain = name and not set(name) & set("*?[")
    pattern = name if plain else f"re:^{re.escape(name)}$"
    if input is None and weight is None:
        return Rule(pattern, skip=True)
    return Rule(pattern, input=input, weight=weight)
