"""What a layer costs in a format: bits, bytes, bit operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.formats import Candidate
from torchq.errors import ConfigError

#: Kind of budget -> what it means.
BUDGETS = {
    "mean_bits": "mean width of the weights",
    "bytes": "bytes of the weights",
    "bit_operations": "multiplications for one input, times the widths of both factors",
}
_FLOAT_BITS = 32


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
    alive: list[Any] = []  # An address is unique only as long as its tensor lives.
    with torch.no_grad(), FlopCounterMode(display=False) as counter, ExitStack() as stack:
        for name in names:
            layer = model.get_submodule(name)
            stack.enter_context(_counted(layer, facts[name], counter, size))
            stack.callback(layer.register_forward_pre_hook(_noted(facts[name], alive)).remove)
        run()
    return facts


def _weight_count(module: nn.Module) -> int:
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return sum(p.numel() for p in own or module.parameters() if p.dim() > 1)


def _noted(facts: LayerFacts, alive: list[Any]) -> Callable[..., None]:
    """Return a hook that notes which tensor each call of a layer reads."""

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].numel():
            x = args[0]
            version = 0 if x.is_inference() else x._version
            facts.reads.add((x.data_ptr(), tuple(x.shape), x.stride(), version))
            alive.append(x)

    return before


@contextmanager
def _counted(module: nn.Module, facts: LayerFacts, counter: Any, size: int) -> Iterator[None]:
    started: list[int] = []

    def before(module: nn.Module, args: Any) -> None:
        started.append(counter.get_total_flops())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        facts.multiplications += (counter.get_total_flops() - started.pop()) / 2 / max(size, 1)

    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(before).remove)
        stack.callback(module.register_forward_hook(after).remove)
        yield


def costs_of(
    name: str, facts: LayerFacts, candidate: Candidate | None, total_weights: int
) -> dict[str, float]:
    """Return the cost of one layer by kind of budget; without a candidate it is float.

    ``total_weights`` counts the elements of the weights of all layers.
    """
    weight_bits = input_bits = _FLOAT_BITS
    if candidate is not None:
        decision = candidate.decisions[name]
        weight_bits = decision.weight.format.bits if decision.weight else _FLOAT_BITS
        input_bits = decision.input.format.bits if decision.input else _FLOAT_BITS
    return {
        "mean_bits": facts.weights * weight_bits / max(total_weights, 1),
        "bytes": facts.weights * weight_bits / 8,
        "bit_operations": facts.multiplications * weight_bits * input_bits,
    }
