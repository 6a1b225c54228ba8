"""Carrying out a plan, and undoing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.config import QuantConfig
from torchq.graph import call_model, tensors_in
from torchq.nn import (
    QuantModule,
    QuantMultiheadAttention,
    QuantSiLU,
    TensorQuantizer,
    convert_,
    revert_,
)
from torchq.nn.calls.routed import route_calls_
from torchq.nn.convert import unchanged_on_error
from torchq.runtime import Runtime, remember_target
from torchq.swap.decision import Decision
from torchq.swap.decisions import SwapReport
from torchq.swap.find_operators import insert_
from torchq.swap.flow import computing_in_float, decide_outputs, float_start
from torchq.swap.plan import decide_all
from torchq.swap.ranges import separate_ranges_, share_common_ranges_
from torchq.swap.share import measure_work, warn_if_small
from torchq.utils import Pattern, device_of, progress_stages


def quantize_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | Runtime | None = None,
    example: Any = None,
    progress: bool = True,
) -> SwapReport:
    """Swap the layers of ``model`` for quantized ones, in place: all that were planned, or none.

    The module objects stay the same; only their classes change and quantizers are added, so
    optimizers, hooks, attributes and references from elsewhere stay valid. The exception is a
    module without parameters that stands in several places, such as one activation object for all
    layers: each place gets a copy, as each needs a range of its own. Without calibration every
    quantizer takes its range from the data of each call; run :func:`torchq.calibrate` next.

    Args:
        model: any module; changed in place.
        config: as for :func:`plan`.
        include: as for :func:`plan`.
        exclude: as for :func:`plan`.
        target: as for :func:`plan`.
        example: the arguments for one call of the model; see
            :func:`torchq.graph.call_arguments`. With it, quantizers that see the same tensor
            become one, so that its readers agree on its range whatever training does. First layers
            that the target runs faster in float stay float, unless a rule is the path of the layer.
        progress: show the stages.

    Returns:
        What was swapped, what was not and why, and which rule decided; ``print`` it.

    Raises:
        ConfigError: See :func:`plan`. Whatever the error, the model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> print(torchq.quantize_(model))
        module  type    what                                                   rule
        0       Conv2d  input int8 per-tensor max, weight int8 axis=0 max      type:...
        1 quantized, 0 skipped, recipe int8; 100.0% of the weights of layers quantized
        >>> type(model[0]).__name__
        'QuantConv2d'
    """
    choice: dict[str, Any] = {"include": include, "exclude": exclude, "target": target}
    reasons: dict[str, str] = {}
    work = None
    while True:
        with progress_stages("quantize", ("plan", "swap"), enabled=progress) as next_stage:
            report = decide_all(model, config, **choice, example=example).without(reasons)
            work = work or measure_work(model, example)
            next_stage()
            try:
                report = _carry_out(model, replace(report, work=work), example, reasons)
            except _StaysFloat as found:
                reasons |= found.reasons
                continue
        if report.target is not None:
            remember_target(model, report.target)
        warn_if_small(model, report.share)
        return report


class _StaysFloat(Exception):
    """Some modules had better stay float, or see nothing: path -> why. It undoes a whole swap."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__()
        self.reasons = reasons


def _carry_out(
    model: nn.Module, report: SwapReport, example: Any, reasons: Mapping[str, str]
) -> SwapReport:
    """Quantize ``model`` as a plan says, in place, and return the plan with what a run added.

    ``reasons`` holds path -> why it stays float, as earlier calls found.
    """
    with unchanged_on_error(model):
        apply_(model, report)
        if example is not None:
            if report.placement is not None:
                report = _fit_to_flow(model, report, example, reasons)
            share_common_ranges_(model, example)
        name_quantizers(model)
    return report


def _fit_to_flow(
    model: nn.Module, report: SwapReport, example: Any, reasons: Mapping[str, str]
) -> SwapReport:
    """Place what depends on the values that flow between layers, and return the new report."""
    placement = report.placement
    assert report.target is not None and placement is not None
    stay_float = float_start(model, report.decisions, report.target, example)
    stay_float |= dict.fromkeys(_unreached(model, report, example), _NO_TENSOR)
    if not stay_float.keys() <= reasons.keys():
        raise _StaysFloat(stay_float)
    if placement.most_unequal is not None:
        separate_ranges_(model, example, placement.most_unequal)
    if not placement.quantized_results:
        return report
    decided = {d.name: d for d in decide_outputs(model, report.decisions, example)}
    for decision in decided.values():
        assert isinstance(decision.module, QuantModule) and decision.output is not None
        decision.module.quantize_output_(decision.output)
    return replace(report, decisions=tuple(decided.get(d.name, d) for d in report.decisions))


_NO_TENSOR = "its operands are no tensors in the run on the example, or it does not run"


def _unreached(model: nn.Module, report: SwapReport, example: Any) -> list[str]:
    """Return the paths of the operators with quantizers that no tensor of the example reaches."""
    seen: set[str] = set()
    with ExitStack() as stack:
        for _, decision in report.operators:
            child, note = model.get_submodule(decision.name), partial(_note, seen, decision.name)
            stack.callback(child.register_forward_pre_hook(note, with_kwargs=True).remove)
        if report.operators:
            stack.enter_context(computing_in_float(model))
            call_model(model, example)
    return [d.name for _, d in report.operators if d.name not in seen]


def _note(seen: set[str], name: str, _: nn.Module, *given: Any) -> None:
    # Attention calls no quantizer of its own while all are off, so its operands tell.
    if any(tensor.is_floating_point() for tensor in tensors_in(given)):
        seen.add(name)


def apply_(model: nn.Module, report: SwapReport) -> None:
    """Convert the modules of a plan, in place."""
    routed = frozenset(id(d.module) for d in report.replaced if d.calls)
    insert_([operator for operator, _ in report.operators], routed)
    children = {id(d): op.owner.get_submodule(op.child) for op, d in report.operators}
    inside: dict[int, dict[str, str]] = {}
    for op, _ in report.operators:
        inside.setdefault(id(op.owner), {})[op.site] = op.child
    done = []
    for d in report.replaced:
        # Modules without tensors of their own, such as additions, have quantizers there.
        with _device_around(model, d.name) or nullcontext():
            done.append(carry_out_(d, children.get(id(d), d.module), inside.get(id(d.module))))
    for d in report.replaced:
        if d.parent is not None:
            setattr(d.parent, d.name.rpartition(".")[2], d.module)
    placement = report.placement
    if placement is None:
        return
    if placement.one_branch:
        for operator, _ in report.operators:
            operator.open_main()
    for module in done:
        if isinstance(module, QuantMultiheadAttention) and "attention" in placement.operators:
            module.quantize_products()
        if isinstance(module, QuantSiLU) and "activation" in placement.operators:
            module.quantize_gate()


def _device_around(model: nn.Module, name: str) -> torch.device | None:
    """Return the device of the nearest module around ``name`` with tensors; None for none."""
    parents = name.split(".")[:-1]
    paths = [".".join(parents[:count]) for count in range(len(parents), -1, -1)]
    devices = (device_of(model.get_submodule(path)) for path in paths)
    return next((device for device in devices if device is not None), None)


def carry_out_(
    decision: Decision,
    module: nn.Module | None = None,
    operators: Mapping[str, str] | None = None,
) -> nn.Module:
    """Convert the module of one decision, in place, and return it."""
    module = decision.module if module is None else module
    descriptors = {"input": decision.input, "weight": decision.weight}
    if decision.calls:
        return route_calls_(module, decision.calls, operators=operators, **descriptors)
    return convert_(module, **descriptors)


def restore_(model: nn.Module) -> tuple[str, ...]:
    """Make every quantized module of ``model`` float again, in place: all of them, or none.

    This undoes :func:`quantize_`. Ranges are dropped; weights stay as they are now. Quantizers that
    the author of the model placed stay.

    Args:
        model: any module; changed in place.

    Returns:
        The paths of the modules that were quantized.
    """
    restored = []
    with unchanged_on_error(model):
        for name, module in list(model.named_modules()):
            if isinstance(module, QuantModule):
                revert_(module)
                restored.append(name)
    remember_target(model, None)
    return tuple(restored)


def name_quantizers(model: nn.Module) -> None:
    """Tell every quantizer its dotted path, for error texts."""
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.name = name
