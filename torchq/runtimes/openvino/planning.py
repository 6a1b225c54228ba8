"""A planning pass for OpenVINO: operators whose codes it computes wrong numbers with."""

from __future__ import annotations

from torch import nn

from torchq.graph import Call, operator_named
from torchq.graph.operators import BATCH_NORMS, POOLS
from torchq.nn import (
    Add,
    Cat,
    InputQuantized,
    QuantModule,
    Tap,
    TensorQuantizer,
    quantized_class,
)
from torchq.swap.facts import Facts
from torchq.swap.passes import View, clips, has_effect
from torchq.swap.plan import Plan

#: Kinds of operators that stay float where something else than a quantizer reads their result: a
#: norm, a recurrent layer or the like behind a pool or sum of codes reads wrong numbers.
_READ_AS_CODES = frozenset(["add", "pool"])
_ACTIVATIONS = frozenset(["silu", "hardswish", "leaky_relu", "elu", "mish"])


def float_results(plan: Plan, facts: Facts) -> Plan:
    """Leave operators in float whose codes OpenVINO 2026.4 computes wrong numbers with.

    Before: operators are quantized wherever they stand. After: sums and pools quantize only what
    quantizers read, at once or behind activations, norms that may be folded and moves; and
    concatenations with stored numbers, such as a class token that is joined with a batch of open
    length, stay float. A module whose rule is its path is left alone.

    What stays float reads in float, so operators in front of it are judged again.
    """
    if facts.flow is None:
        return plan
    while reasons := _reasons(plan, facts):
        plan = plan.in_float(reasons, "float results")
    return plan


def _reasons(plan: Plan, facts: Facts) -> dict[str, str]:
    """Return why modules are to stay float, by path, as far as the plan itself shows."""
    view = View(plan, facts)
    reasons: dict[str, str] = {}
    for call in filter(view.is_quantized, view.flow.calls):
        path = view.path(call)
        # A quantizer stands in front of functions that pool.
        results = view.flow.consumers(call) if isinstance(call.module, Tap) else [call]
        kinds = _READ_AS_CODES.intersection(map(_kind, results))
        if kinds and any(_is_read_in_float(view, result) for result in results):
            reasons[path] = (
                f"{plan.target} computes wrong numbers where it is read in float"
            )
        joins_stored = isinstance(call.module, Cat) and any(
            map(view.is_stored, call.inputs)
        )
        if joins_stored:
            reasons[path] = (
                f"{plan.target} computes wrong numbers where stored ones are joined"
            )
    movable = {d.name for d in plan.replaced if d.by not in d.names}
    return {path: why for path, why in reasons.items() if path in movable}


def _kind(call: Call) -> str:
    """Return the kind of an operator that is called, as a function or as a module; "" for others.

    Kinds are those of :attr:`torchq.runtime.Placement.operators`.
    """
    if call.module is None:
        row = operator_named(call.name)
        return "" if row is None else row.kind
    if isinstance(call.module, Add):
        return "add"
    return "pool" if isinstance(call.module, POOLS) else ""


def _is_read_in_float(view: View, call: Call) -> bool:
    """Return True if something reads a result, or a part of it, that quantizes nothing."""
    return any(
        _is_read_in_float(view, reader)
        if _is_pointwise(view, reader)
        or has_effect(reader, "part")
        or has_effect(reader, "view")
        else not _may_read_codes(view, reader)
        for reader in view.flow.consumers(call)
    )


def _is_pointwise(view: View, call: Call) -> bool:
    """Return True for norms, activations and quantizers."""
    module = call.module
    if isinstance(module, (*BATCH_NORMS, TensorQuantizer)):
        return True
    if view.is_quantized(call) and _quantizes_input_alone(module):
        return "Pool" not in type(module).__name__
    is_activation = module is None and call.name in _ACTIVATIONS
    return is_activation or clips(call) or view.moves_elements(call)


def _quantizes_input_alone(module: nn.Module | None) -> bool:
    if module is None or isinstance(module, QuantModule):
        return isinstance(module, InputQuantized)
    twin = quantized_class(type(module))
    return twin is not None and issubclass(twin, InputQuantized)


def _may_read_codes(view: View, reader: Call) -> bool:
    """Return True for a quantized module, and for a function that is a layer's.

    Of an addition one operand may stay float: that which a layer computes for it.
    """
    row = None if reader.module is not None else operator_named(reader.name)
    return view.is_quantized(reader) or (row is not None and bool(row.layer))
