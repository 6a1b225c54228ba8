"""What a target is: placement, activation types, rewriting passes, checks and known limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch

from torchq.errors import ConfigError
from torchq.onnx.ir import Model, Pass, run_passes
from torchq.onnx.passes.constants import merge_duplicates
from torchq.onnx.targets.activations import ActivationTypes, retype_activations
from torchq.swap import TARGETS, Target

#: Yields a sentence for each place where a graph breaks a rule of a runtime: layer, rule, fix.
Check: TypeAlias = Callable[[Model], Iterator[str]]

MAX_POOLS = "type:torch.nn.modules.pooling.MaxPool[123]d"
AVG_POOLS = "type:torch.nn.modules.pooling.*AvgPool[123]d"
#: Activations that no runtime fuses into a convolution. Without a quantizer in front of them, the
#: convolution would have to return floats.
ACTIVATIONS = tuple(
    f"type:torch.nn.modules.activation.{name}"
    for name in ("SiLU", "Hardswish", "Hardsigmoid", "LeakyReLU", "ELU", "Mish", "Sigmoid")
)


@dataclass(frozen=True)
class OnnxTarget(Target):
    """A runtime that reads Q/DQ files: all that torchq knows about it.

    Attributes:
        activation_types: Integer types of activations in its files; None leaves them as they are.
        passes: Rewritings of the graph, in order, after the types of activations are set.
        checks: Rules of the runtime; a finding is a warning of the export.
        zero_points: Whether codes may have a zero point, which asymmetric ranges need.
        float_types: Types of parameters that the runtime has kernels for.
        limits: Sentences about what the runtime does not do, which no check can see in a file.
    """

    activation_types: ActivationTypes | None = None
    passes: tuple[Pass, ...] = ()
    checks: tuple[Check, ...] = ()
    zero_points: bool = True
    float_types: tuple[torch.dtype, ...] = (torch.float32, torch.float16)
    limits: tuple[str, ...] = ()

    def rewrite(self, model: Model) -> None:
        """Shape the graph of a model for this runtime, in place. Weights stay as they are."""
        if self.activation_types is not None:
            retype_activations(model, self.activation_types)
        run_passes(model, (merge_duplicates, *self.passes))

    def findings(self, model: Model) -> tuple[str, ...]:
        """Return a sentence for each place where the graph breaks a rule of the runtime."""
        return tuple(text for check in self.checks for text in check(model))


def onnx_target(name: str) -> OnnxTarget:
    """Return the target that is registered under ``name``.

    Raises:
        ConfigError: There is no such target, or it says nothing about files.
    """
    target = TARGETS[name]
    if not isinstance(target, OnnxTarget):
        raise ConfigError(
            f"target {name!r}: got a {type(target).__name__}, which says nothing about ONNX files; "
            "expected an OnnxTarget. Register a torchq.onnx.targets.OnnxTarget"
        )
    return target
