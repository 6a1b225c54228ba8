"""What factors of linear layers and of depthwise ones have in common.

The quantizer of an input multiplies each channel by a factor, and that of the weight divides by it:
see :mod:`torchq.workflow.linear_factors` and :mod:`torchq.workflow.even_channels`. Which layers may
have factors, by which factors, is said there. Here stands what quantizers must be like, and that
a change is kept only where the outputs of the model are nearer to those in float.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.formats import PerAxis, PerTensor
from torchq.nn import QuantModule, TensorQuantizer
from torchq.swap.apply import keep_as_plan, plan_of
from torchq.swap.plan import EvenChannels, Factors
from torchq.utils import undone_on_error
from torchq.workflow.added_operators import (
    UNNOTICED,
    FewSamples,
    Sample,
    compared,
    results_of,
)
from torchq.workflow.runs import Comparison, Runs

#: The method of ranges that the ends of channels alone give.
BY_ENDS = "max"
#: The method of weights that looks at what their layer reads.
BY_OUTPUT = "activation"
#: The gain of a layer, in dB, that is written where its error is gone.
MOST_GAIN = 200.0
#: What rules begin with that name no layer.
_OF_KINDS = ("type:", "last", "first")


@dataclass(frozen=True)
class FactorChoice:
    """What calibration found out about factors of the channels that layers read.

    Attributes:
        layers: path of each layer whose quantizers hold factors -> how they were chosen.
        tried: how many layers had factors when the outputs were compared.
        outputs: the outputs without and with them.
    """

    #: The kind of layers, and what factors make of the channels that they read.
    kind: ClassVar[str]
    channels: ClassVar[str]

    layers: Mapping[str, Factors | EvenChannels] = field(default_factory=dict)
    tried: int = 0
    outputs: Comparison = field(default_factory=Comparison)

    @property
    def line(self) -> str:
        """Say in one line what has factors, and what that does; "" where nothing has."""
        if not self.layers:
            return ""
        first = next(iter(self.layers))
        does = "layer reads" if len(self.layers) == 1 else "layers read"
        return (
            f"{len(self.layers)} {self.kind} {does} {self.channels}: {self.outputs}; "
            f"torchq.swap.plan_of(model).explain({first!r})"
        )


C = TypeVar("C", bound=FactorChoice)


# --- which quantizers may hold factors ------------------------------------------------------------


def pair_of(layer: Any) -> tuple[Any, Any]:
    """Return the quantizers of the input and of the weight of a layer."""
    return layer.input_quantizer, layer.weight_quantizer


def names_a_layer(rule: str) -> bool:
    """Return True for a rule that someone wrote about modules by their paths."""
    return bool(rule) and not rule.startswith(_OF_KINDS) and rule != "*"


def rounds_on_fixed_grids(module: nn.Module) -> bool:
    """Return True for a layer whose quantizers of input and weight could hold factors."""
    if not isinstance(module, QuantModule):
        return False
    layer: Any = module
    return isinstance(layer.weight, nn.Parameter) and all(
        isinstance(q, TensorQuantizer)
        and q.quantizing
        and q.pre_quant_scale is None
        and q.delegate is None
        and q.descriptor.fake_quant
        and q.descriptor.format.is_integer
        and isinstance(q.descriptor.granularity, (PerTensor, PerAxis))
        for q in pair_of(layer)
    )


def why_no_factors(model: nn.Module, layers: Sequence[Any]) -> str:
    """Return why the quantizers of layers that read one tensor cannot hold factors; "" if so."""
    in_groups = {id(q) for layer in layers for q in pair_of(layer)}
    held = {id(layer) for layer in layers}
    for module in model.modules():
        children = {id(child) for child in module.children()}
        if id(module) not in held and not children.isdisjoint(in_groups):
            return "its input has the quantizer of another module too"
    for layer in layers:
        if not all(isinstance(q, TensorQuantizer) for q in pair_of(layer)):
            return "its weight is not quantized"
        if any(q.pre_quant_scale is not None for q in pair_of(layer)):
            return "its quantizers have factors already"
        granularity = layer.weight_quantizer.descriptor.granularity
        if granularity not in (PerTensor(), PerAxis((0,))):
            return "its weight has scales along its input channels"
    return ""


# --- ends of channels -----------------------------------------------------------------------------


def joined_ends(one: Tensor, other: Tensor) -> Tensor:
    """Return the ends of what lies between two pairs of ends, (2, channels)."""
    return torch.stack(
        [torch.minimum(one[0], other[0]), torch.maximum(one[1], other[1])]
    )


def ends_of_ranks(ends: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the ends of what lies between those of all ranks, (2, channels)."""
    if group is None:
        return ends
    # One reduction for both ends.
    largest = torch.stack([-ends[0], ends[1]])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return torch.stack([-largest[0], largest[1]])


# --- keeping and taking back ----------------------------------------------------------------------


class _Dropped(Exception):
    """The outputs are no nearer to those in float, so the quantizers stay as they were."""


def hold_if_nearer_(
    choice: C,
    runs: Runs,
    few: FewSamples,
    quantizers: Sequence[TensorQuantizer],
    hold: Callable[[], None],
    least_gain: float,
    group: dist.ProcessGroup | None,
) -> C:
    """Let quantizers hold factors where the outputs are nearer to those in float then.

    Args:
        choice: the layers that are to have factors, and how these were chosen.
        runs: a calibrated model, in eval mode.
        few: samples of its batches.
        quantizers: those of the layers.
        hold: gives them the factors.
        least_gain: by more than how many dB the outputs must be nearer.
        group: processes that decide together.

    Returns:
        The choice with the outputs before and after, and with its layers where these have factors
        now; the plan says so too. Outputs are not compared where nobody would notice what they
        differ by.
    """
    model = runs.model
    outputs = Comparison()
    is_kept = True
    written = [b for q in quantizers for b in (*q.buffers(), *q.parameters())]
    try:
        with undone_on_error(*quantizers, written=written):
            samples = few.of_all()
            before = few.results()
            if _noise_of(samples, before, model, group) <= UNNOTICED:
                raise _Dropped
            hold()
            after = results_of(model, samples)
            outputs = compared(model, samples, before, after, group)
            if not outputs.gain > least_gain:
                raise _Dropped
    except _Dropped:
        is_kept = False
    tried = len(choice.layers) if outputs.batches else 0
    if not is_kept:
        return replace(choice, layers={}, tried=tried, outputs=outputs)
    few.forget_results()
    _write_in_plan(model, choice.layers)
    return replace(choice, tried=tried, outputs=outputs)


def _write_in_plan(
    model: nn.Module, layers: Mapping[str, Factors | EvenChannels]
) -> None:
    """Let the plan say which layers have factors now; others keep what they have."""
    plan = plan_of(model)
    rows = []
    for decision in plan.decisions:
        held = layers.get(decision.name)
        if isinstance(held, Factors):
            decision = replace(decision, factors=held)
        elif held is not None:
            decision = replace(decision, even=held)
        rows.append(decision)
    keep_as_plan(model, replace(plan, decisions=tuple(rows)))


def _noise_of(
    samples: Sequence[Sample],
    results: Sequence[Sequence[Tensor]],
    model: nn.Module,
    group: dist.ProcessGroup | None,
) -> float:
    """Return the noise in results over their signal, of all ranks; 0 where nothing compares."""
    exact = [sample.exact for sample in samples]
    return compared(model, samples, exact, results, group).after or 0.0


def take_back_factors_(model: nn.Module, pending: Iterable[int]) -> None:
    """Let quantizers that calibration sets anew lose the factors of an earlier one, in place."""
    plan = plan_of(model)
    to_set = set(pending)
    modules = dict(model.named_modules())
    rows = []
    for decision in plan.decisions:
        if decision.factors is not None or decision.even is not None:
            quantizers = pair_of(modules[decision.name])
            if all(id(q) in to_set for q in quantizers):
                for quantizer in quantizers:
                    quantizer.pre_quant_scale = None
                decision = replace(decision, factors=None, even=None)
        rows.append(decision)
    if tuple(rows) != plan.decisions:
        keep_as_plan(model, replace(plan, decisions=tuple(rows)))
