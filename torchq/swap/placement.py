"""Quantizers for a runtime: beside the inputs of layers also those of sums, concatenations and pooling, and one range for one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor
from torchq.graph import MAX_POOLING, REARRANGING, call_model
from torchq.nn import QuantModule, TensorQuantizer, share_quantizers_
from torchq.swap.decisions import Decision, by_rules
from torchq.swap.find_operators import MODULES, Operator, find_operators
from torchq.swap.targets import Target
from torchq.utils import Pattern, evaluating, matches, qualified_name

__all__ = ["Placement", "adapt_to_target", "plan_placement", "share_common_ranges_"]


@dataclasses.dataclass(frozen=True)
class Placement:
    """What a target adds to a plan.

    Attributes:
        config: the rules, with the target's in front.
        operators: what becomes a quantized child of its module, with the decision about it.
        skipped: modules whose operators are out of reach, and operators that a rule excludes.
    """

    config: QuantConfig
    operators: tuple[tuple[Operator, Decision], ...]
    skipped: tuple[Decision, ...]


def plan_placement(
    model: nn.Module,
    config: QuantConfig,
    target: Target,
    include: tuple[Pattern, ...],
    example: Any = None,
) -> Placement:
    """Decide where a target wants quantizers; nothing is changed.

    Raises:
        ConfigError: the config takes activation ranges from each call, or not per tensor.
    """
    descriptor = _activation_descriptor(config, target)
    if descriptor is None:
        return Placement(config, (), ())
    patterns = [f"type:{qualified_name(MODULES[kind])}" for kind in sorted(target.operators)]
    rules = [
        Rule(pattern, input=descriptor, optional=True) for pattern in (*patterns, *target.modules)
    ]
    config = dataclasses.replace(config, rules=(*rules, *config.rules))
    found, untraceable = find_operators(model, target.operators, example)
    operators = [
        operator
        for operator in found
        if operator.kind in ("matmul", "attention") or _has_convolution(operator.owner)
    ]
    decisions = [
        (operator, by_rules(operator.names, operator.module(), config, include))
        for operator in operators
    ]
    skipped = [decision for _, decision in decisions if decision.reason]
    skipped += [
        Decision(
            u.owner_names,
            u.owner,
            type(u.owner),
            reason=f"{u.reason}; its operators stay float. {_WRITE}",
        )
        for u in untraceable
    ]
    return Placement(config, tuple((o, d) for o, d in decisions if not d.reason), tuple(skipped))


_CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(part, _CONVOLUTIONS) for part in module.modules())


_WRITE = (
    "Let a run show them: pass example=..., of which the source must be there, or write "
    "torchq.nn.QuantAdd() and the like in it"
)


def _activation_descriptor(config: QuantConfig, target: Target) -> QuantDescriptor | None:
    """How the config quantizes activations, at 8 bits at least; None where it does not."""
    found = next((rule.input for rule in config.rules if rule.input is not None), None)
    if found is None:
        return None
    if found.dynamic or found.granularity != PerTensor():
        raise ConfigError(
            f"target {target.name}: the config quantizes activations as {found}; expected a fixed range per tensor"
        )
    narrow = isinstance(found.num_bits, int) and found.num_bits < 8
    return found.replace(num_bits=8, name=None) if narrow else found.replace(name=None)


def adapt_to_target(decisions: Sequence[Decision], target: Target) -> tuple[Decision, ...]:
    """Return the decisions without what the integer kernels of a target cannot take.

    Inputs stay float where the target has no integer kernel; weights get one scale where it takes
    no more.
    """
    return tuple(_adapted(decision, target) for decision in decisions)


def _adapted(decision: Decision, target: Target) -> Decision:
    def selected(patterns: tuple[str, ...]) -> bool:
        return any(matches(pattern, decision.names, decision.module) for pattern in patterns)

    if decision.reason:
        return decision
    if selected(target.float_inputs):
        if decision.weight is None:
            reason = f"{target.name} has no integer kernel for it"
            return dataclasses.replace(decision, reason=reason)
        decision = dataclasses.replace(decision, input=None)
    weight = decision.weight
    if weight is not None and weight.axis is not None and selected(target.per_tensor_weights):
        decision = dataclasses.replace(decision, weight=weight.replace(axis=None, name=None))
    return decision


def share_common_ranges_(model: nn.Module, example: Any) -> list[list[str]]:
    """Let quantizers of one tensor be one, also across operators that only move values (max pooling, reshapes).

    What a concatenation joins has one range, so whatever else reads these tensors takes that range: a layer whose result is quantized
    with two scales would stay float.

    Args:
        model: quantized; run once on ``example`` with all quantizers off, in eval mode.
        example: see :func:`torchq.graph.call_model`.

    Returns:
        the paths that were put together.
    """
    paths: dict[int, str] = {}
    apart = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantModule):
            apart |= {id(q) for q, _ in module.quantized_weights()}
        if isinstance(module, TensorQuantizer):
            paths[id(module)] = path
    chosen = {key: path for key, path in paths.items() if key not in apart}
    flow = _ValueFlow()
    modes = [(m, m.mode) for m in model.modules() if isinstance(m, TensorQuantizer)]
    handles = [m.register_forward_pre_hook(flow.seen) for m, _ in modes if id(m) in chosen]
    try:
        for quantizer, _ in modes:
            quantizer.mode = "off"
        with evaluating(model), torch.no_grad(), flow:
            call_model(model, example)
    finally:
        for handle in handles:
            handle.remove()
        for quantizer, mode in modes:
            quantizer.mode = mode
    return [_share(model, group, chosen) for group in flow.groups() if len(group) > 1]


def _share(model: nn.Module, group: list[TensorQuantizer], paths: dict[int, str]) -> list[str]:
    first = group[0].descriptor.replace(name=None)
    alike = [
        paths[id(q)]
        for q in group
        if q.descriptor.replace(name=None) == first and q.mode == group[0].mode
    ]
    if len(alike) > 1 and first.granularity == PerTensor():
        share_quantizers_(model, alike)
    return alike


_MOVES = REARRANGING | MAX_POOLING


class _ValueFlow(TorchFunctionMode):
    """Which quantizers see the same values, while active."""

    def __init__(self) -> None:
        super().__init__()
        self._origin: dict[int, int] = {}
        self._alive: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # ids are unique while their tensors live; the copy tells in-place changes
        self._seen: dict[int, list[TensorQuantizer]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if (
            getattr(func, "__name__", "") in _MOVES
            and args
            and isinstance(args[0], Tensor)
            and isinstance(out, Tensor)
        ):
            origin = self._root(args[0])
            if self._known(out) is None:
                self._keep(out)
                self._origin[id(out)] = origin
        return out

    def _known(self, tensor: Tensor) -> Tensor | None:
        kept = self._alive.get(id(tensor))
        return None if kept is None or not torch.equal(kept[1], tensor) else tensor

    def _keep(self, tensor: Tensor) -> None:
        self._alive[id(tensor)] = (tensor, tensor.clone())

    def _root(self, tensor: Tensor) -> int:
        if self._known(tensor) is None:
            self._keep(tensor)
            self._origin[id(tensor)] = len(self._seen)
            self._seen[len(self._seen)] = []
        return self._origin[id(tensor)]

    def seen(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        """A pre-forward hook: ``quantizer`` is called on ``args[0]``."""
        users = self._seen[self._root(args[0])]
        if isinstance(quantizer, TensorQuantizer) and all(user is not quantizer for user in users):
            users.append(quantizer)

    def groups(self) -> list[list[TensorQuantizer]]:
        """Quantizers that see the same values; one that sees several tensors joins them."""
        groups: list[list[TensorQuantizer]] = []
        for users in self._seen.values():
            touching = [g for g in groups if any(a is b for a in g for b in users)]
            merged = [q for g in touching for q in g]
            merged += [q for q in users if all(q is not other for other in merged)]
            groups = [g for g in groups if all(g is not other for other in touching)] + [merged]
        return groups
