"""Carrying out a plan, and undoing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from torchq.config import QuantConfig
from torchq.nn import (
    QuantModule,
    QuantMultiheadAttention,
    QuantSiLU,
    TensorQuantizer,
    convert_,
    revert_,
    route_calls_,
)
from torchq.nn.transaction import unchanged_on_error
from torchq.swap.decision import Decision
from torchq.swap.decisions import SwapReport
from torchq.swap.find_operators import insert_
from torchq.swap.placement import share_common_ranges_
from torchq.swap.plan import plan
from torchq.utils import Pattern

__all__ = ["quantize_", "restore_", "apply_", "name_quantizers"]


def quantize_(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | None = None,
    example: Any = None,
) -> SwapReport:
    """Swap the layers of ``model`` for quantized ones, in place.

    The module objects stay the same; only their classes change and quantizers are added, so optimizers, hooks, attributes
    and references from elsewhere stay valid. The exception is a module without parameters that stands in several places, such as one
    activation object for all layers: each place gets a copy, as each needs a range of its own. Without calibration every quantizer
    takes its range from the data of each call; run :func:`torchq.calibrate` next.

    Args:
        model, config, include, exclude, target: as for :func:`plan`.
        example: arguments for one call of the model (a tensor, a tuple, or a mapping of keyword arguments): quantizers that see the
            same tensor become one then, so that its readers agree on its range whatever training does.

    Returns:
        what was swapped, what was not and why, and which rule decided.

    Raises:
        ConfigError: as :func:`plan`; the model is unchanged then.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> print(torchq.quantize_(model))
        module  type    what                                                   rule
        0       Conv2d  input int8 per-tensor max, weight int8 axis=0 max      type:torch.nn.modules.conv.Conv[123]d
        1 quantized, 0 skipped, recipe int8
        >>> type(model[0]).__name__
        'QuantConv2d'
    """
    report = plan(model, config, include=include, exclude=exclude, target=target, example=example)
    with unchanged_on_error(model):
        apply_(report)
        if example is not None:
            share_common_ranges_(model, example)
        name_quantizers(model)
    return report


def apply_(report: SwapReport) -> None:
    """Convert the modules of a plan; all or none."""
    insert_([operator for operator, _ in report.operators])
    children = {
        id(d): operator.owner.get_submodule(operator.child) for operator, d in report.operators
    }
    done: list[nn.Module] = []
    try:
        for d in report.replaced:
            module = children.get(id(d), d.module)
            done.append(carry_out_(d, module))
    except Exception:
        for module in (*done, *(operator.owner for operator, _ in report.operators)):
            if isinstance(module, QuantModule):
                revert_(module)
        raise
    for d in report.replaced:
        if d.parent is not None:
            setattr(d.parent, d.name.rpartition(".")[2], d.module)
    if report.target is not None and report.target.one_branch:
        for operator, _ in report.operators:
            operator.open_main()
    kinds = report.target.operators if report.target is not None else ()
    for module in done:
        if isinstance(module, QuantMultiheadAttention) and "attention" in kinds:
            module.quantize_products()
        if isinstance(module, QuantSiLU) and "activation" in kinds:
            module.quantize_gate()


def carry_out_(decision: Decision, module: nn.Module | None = None) -> nn.Module:
    """Convert the module of one decision, in place, and return it.

    Args:
        decision: Its ``reason`` is empty.
        module: The module to convert; default that of the decision.
    """
    module = decision.module if module is None else module
    descriptors = {"input": decision.input, "weight": decision.weight}
    if decision.calls:
        return route_calls_(module, decision.calls, **descriptors)
    return convert_(module, **descriptors)


def restore_(model: nn.Module) -> tuple[str, ...]:
    """Make every quantized module of ``model`` float again, in place: undo :func:`quantize_`.

    Ranges are dropped; weights stay as they are now. Quantizers that the author of the model
    placed stay.

    Args:
        model: any module; changed in place.

    Returns:
        The paths of the modules that were quantized.
    """
    restored = []
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantModule):
            revert_(module)
            restored.append(name)
    return tuple(restored)


def name_quantizers(model: nn.Module) -> None:
    """Tell every quantizer its dotted path, for error texts."""
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.name = name
