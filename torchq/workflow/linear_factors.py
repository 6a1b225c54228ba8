"""Which linear layers read inputs that factors bring to one size: SmoothQuant in calibration.

A channel of an input that is much larger than the others takes the codes from them. The quantizer
of the input divides each channel by a factor, and that of the weight multiplies its column by it.
Factors are powers of two, so that every product has the bits that it had: weights and the float
model stay what they are, and files hold a multiplication and the codes of the weight with factors.

A run in float shows the ends of every channel, which give each range without another run, and some
rows, on which a few exponents are tried with the quantizers as they will be. What the layers gain
is no answer: on some transformers the outputs get worse. So outputs with and without factors are
compared with those in float on samples of every batch, and factors are kept where these are nearer.

Reference: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models (ICML 2023), section 4.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.graph import version_of
from torchq.nn import TensorQuantizer
from torchq.swap.apply import plan_of
from torchq.swap.plan import Factors, Plan
from torchq.utils import state_kept, watching
from torchq.workflow.added_operators import FewSamples
from torchq.workflow.input_factors import (
    BY_ENDS,
    BY_OUTPUT,
    MOST_GAIN,
    FactorChoice,
    ends_of_ranks,
    hold_if_nearer_,
    joined_ends,
    names_a_layer,
    pair_of,
    rounds_on_fixed_grids,
    why_no_factors,
)
from torchq.workflow.layer_matrices import channel_ranges
from torchq.workflow.runs import Runs

#: Exponents that are tried for each input; see :func:`channel_factors`.
_ALPHAS = (0.5, 0.8)
#: Exponents of factors that quantizers hold: the largest float16 is 2**16.
_EXPONENTS = 10
#: Rows of an input that exponents are tried on, and how many of them one call gives at most.
_ROWS, _ROWS_OF_CALL = 64, 16
#: Rows that a layer must have read: the ends of each channel are unknown after a few, and inputs
#: that come later would be clipped, which they are not in one range for all channels.
_FEWEST = 512
#: The part of the error of its layers that an input with factors may keep, to be worth them.
_WORTH = 0.8
#: By how many dB the outputs must be nearer to float.
_LEAST_GAIN = 1.0
#: The part of the work of a model that its linear layers must have.
_SHARE = 0.5


class LinearFactorChoice(FactorChoice):
    """What calibration found out about factors of the channels that linear layers read."""

    kind = "linear"
    channels = "channels divided by factors (SmoothQuant)"


# --- factors, for calibration and for smooth_ -----------------------------------------------------


def channel_factors(x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Return ``x_j^alpha / weight_j^(1 - alpha)`` of each channel j.

    With the largest magnitudes it is equation 4 of the paper. The factors are divided by their
    geometric mean, so that equal channels change nothing. A channel that is zero on either side
    keeps the factor 1. ``x`` are the sizes of input channels, ``weight`` those of columns.
    """
    live = (x > 0) & (weight > 0)
    log = alpha * x.clamp(min=1e-30).log() - (1 - alpha) * weight.clamp(min=1e-30).log()
    if not bool(live.any()):
        return torch.ones_like(x)
    return torch.where(live, (log - log[live].mean()).exp(), 1.0)


def powers_of_two(factors: Tensor) -> Tensor:
    """Return the nearest powers of two, which change no digit of what they multiply."""
    exponents = factors.log2().round().clamp(-_EXPONENTS, _EXPONENTS)
    return exponents.exp2()


def hold_factors_(layers: Iterable[object], factors: Tensor) -> None:
    """Let quantizers divide what layers read by factors, and multiply their weights by them."""
    for layer in layers:
        of_input, of_weight = pair_of(layer)
        of_input.pre_quant_scale = factors.reciprocal()
        of_weight.pre_quant_scale = factors.unsqueeze(0)


# --- what layers read -----------------------------------------------------------------------------


def linear_layers(
    model: nn.Module, pending: Iterable[int], method: str | None
) -> dict[str, Any]:
    """Return path -> linear layer whose quantizers may hold factors, where these carry the work.

    Args:
        model: quantized.
        pending: ids of the quantizers that calibration sets.
        method: in place of that of the descriptors of activations.
    """
    plan = plan_of(model)
    if _linear_share(plan) < _SHARE:
        return {}
    to_set = set(pending)
    layers = {}
    for path, module in model.named_modules():
        decision = plan.decision(path)
        if decision is None or names_a_layer(decision.by):
            continue
        if _may_hold(module) and all(id(q) in to_set for q in pair_of(module)):
            of_input, of_weight = (q.descriptor for q in pair_of(module))
            is_by_ends = (method or of_input.calib_method) == BY_ENDS
            if is_by_ends and of_weight.calib_method != BY_OUTPUT:
                layers[path] = module
    return layers


def _linear_share(plan: Plan) -> float:
    """Return the part of the work of a model that its linear layers have."""
    work = plan.work
    total = 0.0 if work is None else sum(work.amounts.values())
    if work is None or not total:
        return 0.0
    linear = (a for n, a in work.amounts.items() if work.classes[n].endswith("Linear"))
    return sum(linear) / total


def _may_hold(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and rounds_on_fixed_grids(module)


class LinearInputs:
    """What linear layers read in a run in float.

    Attributes:
        layers: path -> layer.
        ends: path -> the smallest and the largest number of each channel, (2, channels).
        rows: path -> some rows, of the first layer of those that read one tensor.
        first: path -> the path of the first layer that reads the same tensor.
        counts: path -> how many rows it read.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self.layers = dict(layers)
        self.ends: dict[str, Tensor] = {}
        self.rows: dict[str, Tensor] = {}
        self.first: dict[str, str] = {}
        self.counts: dict[str, int] = {}
        #: What was read in order, while it exists, and at which of its versions.
        self._read: list[tuple[weakref.ref[Tensor], int, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at the inputs of the layers inside the ``with`` block."""
        seen = [(layer, partial(self._see, n)) for n, layer in self.layers.items()]
        with watching(seen, before=True):
            yield
        self._read.clear()

    def _see(self, name: str, args: Any, kwargs: Any, _: None) -> None:
        given: Tensor = args[0] if args else kwargs["input"]
        # Inference tensors count no versions. One that was overwritten since counts as the same:
        # its layers then share factors, which suit the ends of both.
        version = version_of(given)
        if name not in self.first:
            same = (
                other
                for reference, read_version, other in self._read
                if reference() is given and read_version == version
            )
            leader = next(same, name)
            self.first[name] = self.first.get(leader, leader)
            self._read.append((weakref.ref(given), version, name))
        x = given.detach()
        flat = x.reshape(-1, x.shape[-1])
        self.counts[name] = self.counts.get(name, 0) + len(flat)
        if not len(flat):
            return
        # On CPUs torch.aminmax takes up to ten times as long along the first dimension.
        ends = torch.stack([flat.amin(0), flat.amax(0)])
        before = self.ends.get(name)
        self.ends[name] = ends if before is None else joined_ends(before, ends)
        if self.first[name] == name:
            self._keep(name, flat)

    def _keep(self, name: str, flat: Tensor) -> None:
        known = self.rows.get(name)
        wanted = _ROWS - (0 if known is None else len(known))
        if wanted > 0:
            few = min(wanted, _ROWS_OF_CALL)
            rows = flat[:: max(1, len(flat) // few)][:few].clone()
            self.rows[name] = rows if known is None else torch.cat([known, rows])


@dataclass(frozen=True)
class _Group:
    """Layers that read one tensor.

    Attributes:
        names: their paths.
        layers: the layers.
        ends: of the channels of the tensor, on all ranks, (2, channels).
        rows: some of the tensor, those of this rank; None without one.
    """

    names: tuple[str, ...]
    layers: tuple[Any, ...]
    ends: Tensor
    rows: Tensor | None

    @property
    def quantizers(self) -> list[TensorQuantizer]:
        """Those that hold factors, each once."""
        return list(dict.fromkeys(q for layer in self.layers for q in pair_of(layer)))


def _groups(
    model: nn.Module, inputs: LinearInputs, group: dist.ProcessGroup | None
) -> list[_Group]:
    """Return the layers whose quantizers can hold factors, by the tensors that they read."""
    members: dict[str, list[str]] = {}
    for name, first in _first_of_ranks(inputs, group).items():
        members.setdefault(first, []).append(name)
    result = []
    for names in members.values():
        layers = tuple(inputs.layers[name] for name in names)
        ends = _ends_of(names, layers, inputs, group)
        is_seen = _count(names, inputs, group) >= _FEWEST
        is_known = is_seen and bool(ends.isfinite().all())
        if is_known and not why_no_factors(model, layers):
            rows = inputs.rows.get(names[0])
            result.append(_Group(tuple(names), layers, ends, rows))
    return result


def _count(
    names: Sequence[str], inputs: LinearInputs, group: dist.ProcessGroup | None
) -> int:
    """Return how many rows the first of some layers read, on all ranks."""
    count = torch.tensor(inputs.counts.get(names[0], 0), device=_device(inputs))
    if group is not None:
        dist.all_reduce(count, group=group)
    return int(count)


def _device(inputs: LinearInputs) -> torch.device:
    return next(iter(inputs.layers.values())).weight.device


def _first_of_ranks(
    inputs: LinearInputs, group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Return which layers read one tensor, on all ranks that of the first which ran them."""
    if group is None:
        return inputs.first
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, inputs.first, group=group)
    return next((first for first in gathered if first), {})


def _ends_of(
    names: Sequence[str],
    layers: Sequence[Any],
    inputs: LinearInputs,
    group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the ends of the channels of a tensor that layers read, on all ranks."""
    weight = layers[0].weight
    lows = weight.new_full(weight.shape[1:], math.inf)
    ends = torch.stack([lows, -lows])
    for name in names:
        if name in inputs.ends:
            ends = joined_ends(ends, inputs.ends[name].to(ends))
    return ends_of_ranks(ends, group)


# --- choosing -------------------------------------------------------------------------------------


def _set_(group: _Group, factors: Tensor | None) -> None:
    """Let the quantizers of a group hold factors, or none, with the ranges that follow."""
    if factors is None:
        for quantizer in group.quantizers:
            quantizer.pre_quant_scale = None
    else:
        hold_factors_(group.layers, factors)
    for quantizer in dict.fromkeys(layer.input_quantizer for layer in group.layers):
        quantizer.calibrate_on(quantizer.scaled(group.ends), BY_ENDS)
    for layer in group.layers:
        of_weight = layer.weight_quantizer
        of_weight.calibrate_on(of_weight.scaled(layer.weight))


def _error(group: _Group) -> float:
    """Return the squared error of the results of a group on its rows, as its quantizers are."""
    if group.rows is None:
        return 0.0
    error = 0.0
    for layer in group.layers:
        of_input, of_weight = pair_of(layer)
        weight = layer.weight.detach()
        rounded = of_input(group.rows) @ of_weight(weight).t()
        error += float((rounded - group.rows @ weight.t()).double().square().sum())
    return error


def _factors_of(group: _Group, alpha: float) -> Tensor:
    largest = group.ends.abs().amax(0).float()
    columns = torch.stack([channel_ranges(x, inputs=True) for x in group.layers])
    return powers_of_two(channel_factors(largest, columns.float().amax(0), alpha))


def _best_factors(
    groups: Sequence[_Group], group: dist.ProcessGroup | None
) -> list[tuple[_Group, Factors]]:
    """Return the factors with the least error of each group that is worth them."""
    errors = []
    for one in groups:
        of_one = [_error(one)]
        for alpha in _ALPHAS:
            _set_(one, _factors_of(one, alpha))
            of_one.append(_error(one))
        _set_(one, None)
        errors.append(of_one)
    device = groups[0].ends.device
    sums = torch.tensor(errors, dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(sums, group=group)
    chosen = []
    for one, (without, *tried) in zip(groups, sums.tolist(), strict=True):
        least = min(tried)
        if least < _WORTH * without:
            gain = 10 * math.log10(without / least) if least else MOST_GAIN
            factors = Factors(_ALPHAS[tried.index(least)], min(gain, MOST_GAIN))
            chosen.append((one, factors))
    return chosen


def choose_factors_(
    runs: Runs,
    inputs: LinearInputs,
    few: FewSamples,
    group: dist.ProcessGroup | None = None,
) -> LinearFactorChoice:
    """Let quantizers of linear layers hold factors where the outputs are nearer to float then.

    Args:
        runs: a calibrated model, in eval mode.
        inputs: what its linear layers read.
        few: samples of its batches.
        group: processes that decide together.

    Returns:
        What was found out, with the outputs before and after it.
    """
    model = runs.model
    if not inputs.layers:
        return LinearFactorChoice()
    groups = _groups(model, inputs, group)
    if not groups:
        return LinearFactorChoice()
    quantizers = [q for one in groups for q in one.quantizers]
    with ExitStack() as stack:
        for quantizer in quantizers:
            stack.enter_context(state_kept(quantizer))
        chosen = _best_factors(groups, group)
    if not chosen:
        return LinearFactorChoice()

    def set_all() -> None:
        for one, factors in chosen:
            _set_(one, _factors_of(one, factors.alpha))

    layers = {name: by for one, by in chosen for name in one.names}
    choice = LinearFactorChoice(layers)
    return hold_if_nearer_(choice, runs, few, quantizers, set_all, _LEAST_GAIN, group)
