"""Deciding every swap before anything changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError
from torchq.graph import state_kept
from torchq.nn import CallSite
from torchq.nn.operator_routes import MARK
from torchq.swap.decisions import (
    SwapReport,
    check_used,
    config_or_default,
    decide,
    patterns,
    resolve_positions,
)
from torchq.swap.find_operators import Operator
from torchq.swap.placement import adapt_to_target, plan_placement
from torchq.swap.share import measure_work, warn_if_small
from torchq.swap.targets import TARGETS, Target
from torchq.utils import Pattern, qualified_name


def targets() -> tuple[str, ...]:
    """Return the names of the runtimes that ``target=`` of several functions accepts.

    Example:
        >>> "onnxruntime" in torchq.targets()
        True
    """
    return tuple(sorted(TARGETS))


def plan(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | None = None,
    example: Any = None,
) -> SwapReport:
    """Decide what :func:`quantize_` would do; nothing is changed.

    Args:
        model: any module; a bare layer too.
        config: the rules; default :func:`torchq.recipes.int8`.
        include: only modules that match one of these patterns.
        exclude: no module that matches one of these patterns.
        target: also place quantizers where this runtime wants them; one of
            :func:`torchq.targets`. Additions, concatenations and the like in the forward of a
            module become children of it, named ``quant_add``, ``quant_cat_1``, ...
        example: the arguments for one call of the model; see
            :func:`torchq.graph.call_arguments`. The model runs once on it, which shows the
            operators of forwards that cannot be traced, and the function calls with weights in
            every forward. Without it these calls are found in modules without children, and where
            a forward passes the weight of a child to a function.

    Returns:
        Every decision with the rule that made it; ``print`` it for a dry run. Its last line says
        how much is quantized: of the multiply-adds of the example, or of the weights of layers
        without one. Below a third of what was not excluded, a warning names the reasons.

    Raises:
        InputError: ``config`` is no QuantConfig.
        ConfigError: A pattern of ``include`` or ``exclude``, or a rule that is not ``optional``,
            selects no module that could be quantized; or nothing at all would be quantized; or
            the model is a program of torch.export.
    """
    report = decide_all(
        model, config, include=include, exclude=exclude, target=target, example=example
    )
    report = replace(report, work=measure_work(model, example))
    warn_if_small(model, report.share)
    return report


def decide_all(
    model: nn.Module,
    config: QuantConfig | None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | None = None,
    example: Any = None,
) -> SwapReport:
    """Return what :func:`plan` does, without the work of the model."""
    config = config_or_default(config)
    _refuse_programs(model)
    wanted = patterns(include)
    config = config.with_rules(*(Rule(pattern, skip=True) for pattern in patterns(exclude)))
    with state_kept(model):
        config = resolve_positions(model, config, example=example)
        if target is None:
            decisions = decide(model, config, wanted, example=example)
            report = SwapReport(config, decisions)
        else:
            report = _plan_for_target(model, config, wanted, TARGETS[target], example)
    check_used(model, report.config, wanted, report.decisions)
    return report


def _refuse_programs(model: nn.Module) -> None:
    """Raise ConfigError for a program of torch.export, which has no layers left."""
    # Such a module refuses to change its mode by methods of its own.
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        raise ConfigError(
            f"{qualified_name(type(model))}: got a program of torch.export, whose layers are calls "
            "of operators; expected the model that was exported. Quantize it, then export it"
        )


def _plan_for_target(
    model: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...],
    target: Target,
    example: Any,
) -> SwapReport:
    placement = plan_placement(model, config, target, include, example)
    rewritten = frozenset(id(operator.owner) for operator, _ in placement.operators)
    layers = adapt_to_target(
        decide(model, placement.config, include, example=example, rewritten=rewritten), target
    )
    calls = {id(d.module): d.calls for d in layers if d.calls}
    reasons = [_beside_calls(o, calls.get(id(o.owner), ())) for o, _ in placement.operators]
    found = list(zip(placement.operators, reasons, strict=True))
    operators = tuple(pair for pair, reason in found if not reason)
    float_operators = (replace(d, reason=reason) for (_, d), reason in found if reason)
    skipped = (*float_operators, *placement.skipped)
    decisions = (*layers, *(d for _, d in operators), *skipped)
    return SwapReport(placement.config, decisions, operators, target)


def _beside_calls(operator: Operator, calls: Sequence[CallSite]) -> str:
    """Return why an operator stays float beside quantized function calls; "" if it need not."""
    if calls and not operator.site.startswith(MARK):
        return (
            "its module keeps its own forward, in which function calls are quantized, and the "
            "source of that cannot be rewritten"
        )
    # Their calls are counted, and a quantized operator makes such calls too.
    is_product = operator.kind in ("matmul", "attention")
    if is_product and any(site.kind == "matmul" and not site.weight for site in calls):
        return "its forward computes the weight of a matmul, which is quantized"
    return ""
