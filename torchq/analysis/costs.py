"""What a layer costs in a format: bits, bytes, bit operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.swap import Decision

#: Kinds of budget.
BUDGETS = ("mean_bits", "bytes", "bit_operations")
FLOAT_BITS = 32


@dataclass
class LayerFacts:
    """What does not depend on the format.

    Attributes:
        weights: elements of its weights.
        multiplications: for one input.
        reads: what tells the input of each call from other tensors: equal for layers that read one
            tensor, or equal views of it.
    """

    weights: int
    multiplications: float = 0.0
    reads: set[tuple[Any, ...]] = field(default_factory=set)


def check_budget(budget: Mapping[str, float]) -> None:
    """Raise ConfigError unless every kind of budget is known and every bound is positive."""
    if not isinstance(budget, Mapping) or not budget:
        raise ConfigError(
            f"mixed_precision: got budget {budget!r}; expected a mapping such as {{'mean_bits': 5}}"
        )
    for kind, bound in budget.items():
        if kind not in BUDGETS:
            raise ConfigError(
                f"mixed_precision: got budget {kind!r}; expected one of {', '.join(BUDGETS)}"
            )
        if not bound > 0:
            raise ConfigError(f"mixed_precision: got {kind}={bound!r}; expected a positive number")


def gather_facts(
    model: nn.Module, names: list[str], run: Callable[[], Any], size: int
) -> dict[str, LayerFacts]:
    """Return the facts of layers of a float model; ``run`` runs it on ``size`` inputs."""
    # The module imports Triton, which `import torchq` must not do.
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    facts = {name: LayerFacts(_weight_count(model.get_submodule(name))) for name in names}
    alive: list[Tensor] = []  # An address is unique only as long as its tensor lives.
    started: list[int] = []
    with torch.no_grad(), FlopCounterMode(display=False) as counter, ExitStack() as stack:
        for name in names:

            def before(module: nn.Module, args: Any, facts: LayerFacts = facts[name]) -> None:
                started.append(counter.get_total_flops())
                if args and isinstance(args[0], Tensor) and args[0].numel():
                    x = args[0]
                    version = 0 if x.is_inference() else x._version
                    facts.reads.add((x.data_ptr(), tuple(x.shape), x.stride(), version))
                    alive.append(x)

            def after(
                module: nn.Module, args: Any, output: Any, facts: LayerFacts = facts[name]
            ) -> None:
                flops = counter.get_total_flops() - started.pop()
                facts.multiplications += flops / 2 / max(size, 1)

            layer = model.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(before).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        run()
    return facts


def _weight_count(module: nn.Module) -> int:
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return sum(p.numel() for p in own or module.parameters() if p.dim() > 1)


def widths_of(decision: Decision | None) -> tuple[int, int]:
    """Return the bits of the weight and of the input of a layer; without a decision it is float."""
    weight = None if decision is None else decision.weight
    input = None if decision is None else decision.input
    return (
        FLOAT_BITS if weight is None else weight.format.bits,
        FLOAT_BITS if input is None else input.format.bits,
    )


def costs_of(facts: LayerFacts, decision: Decision | None, total_weights: int) -> dict[str, float]:
    """Return the cost of one layer by kind of budget, beside the weights of all layers."""
    weight_bits, input_bits = widths_of(decision)
    return {
        "mean_bits": facts.weights * weight_bits / max(total_weights, 1),
        "bytes": facts.weights * weight_bits / 8,
        "bit_operations": facts.multiplications * weight_bits * input_bits,
    }
