"""Which depthwise layers read channels that factors bring to one size.

A depthwise layer reads each channel with weights of its own, so nothing but the range of its whole
input ties the channels together: one that is a hundredth of the largest has two codes. Its weights
have a scale for each channel, which takes any factor without losing a code. So the quantizer of the
input multiplies channels by powers of two, and that of the weight divides by them: weights and the
float model stay what they are, to the last bit.

Factors need a layer in front that alone makes the channels, as files and kernels have them in its
weights: see :mod:`torchq.swap.even_channels`. Between the two lies what keeps factors, or clips, as
ReLU6 does, no lower than the range of the quantizer ends.

Each channel gets the factor with which its values, some of each batch, come out of the quantizer
nearest to what they were. It doubles the largest value of the channel at most beyond the range.
Ranges that are averaged over samples by now hold all values again: what made averages better is
that a few channels are larger than the others. A choice is kept where the outputs are nearer to
those in float.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.1, which equalizes weights for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import TorchqError
from torchq.formats import PerAxis, PerTensor
from torchq.graph import Flow, record
from torchq.graph.operators import BATCH_NORMS, TRANSPOSED
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.batchnorm_folding import OutputScaling
from torchq.swap.apply import plan_of
from torchq.swap.plan import EvenChannels
from torchq.utils import state_kept, watching
from torchq.workflow.added_operators import FewSamples
from torchq.workflow.equalization import Pair, find_pairs, is_depthwise
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
from torchq.workflow.layer_changes import is_leaf
from torchq.workflow.modes import quantizers
from torchq.workflow.runs import Runs

#: Exponents of factors that are tried. The first of equal ones is taken.
_EXPONENTS = (0, -1, 1, 2, 3, 4, 5, 6, 7, 8)
#: Values of each channel that they are tried on, of one call and in all.
_VALUES_OF_CALL, _VALUES = 1024, 8192
#: How far beyond the range the largest value of a channel may come to lie.
_BEYOND = 2.0
#: By how many dB the error of an input must fall to be worth factors.
_WORTH = 1.0
#: By how many dB the outputs must be nearer to float. Files and kernels take no longer with
#: factors, so nothing speaks against a small gain.
_LEAST_GAIN = 0.0


class EvenChoice(FactorChoice):
    """What calibration found out about the sizes of channels that depthwise layers read."""

    kind = "depthwise"
    channels = "channels of one size"


# --- what layers read -----------------------------------------------------------------------------


def depthwise_layers(model: nn.Module, pending: Iterable[int]) -> dict[str, Any]:
    """Return path -> depthwise layer whose quantizers may hold factors.

    Args:
        model: quantized.
        pending: ids of the quantizers that calibration sets.
    """
    plan = plan_of(model)
    to_set = set(pending)
    layers = {}
    for path, module in model.named_modules():
        decision = plan.decision(path)
        if decision is None or names_a_layer(decision.by) or not is_depthwise(module):
            continue
        if rounds_on_fixed_grids(module) and all(
            id(q) in to_set for q in pair_of(module)
        ):
            of_input, of_weight = (q.descriptor for q in pair_of(module))
            is_whole = of_input.granularity == PerTensor()
            is_by_channel = of_weight.granularity == PerAxis((0,))
            if is_whole and is_by_channel and of_weight.calib_method != BY_OUTPUT:
                layers[path] = module
    return layers


class DepthwiseInputs:
    """What depthwise layers read in a run in float.

    Attributes:
        layers: path -> layer.
        values: path -> some values of each channel, (channels, values).
        ends: path -> the smallest and the largest number of each channel, (2, channels).
        method: the one that sets ranges, in place of that of the descriptors.
    """

    def __init__(self, layers: Mapping[str, Any], method: str | None) -> None:
        self.layers = dict(layers)
        self.method = method
        self.values: dict[str, Tensor] = {}
        self.ends: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at the inputs of the layers inside the ``with`` block."""
        seen = [(layer, partial(self._see, n)) for n, layer in self.layers.items()]
        with watching(seen, before=True):
            yield

    def _see(self, name: str, args: Any, kwargs: Any, _: None) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).detach()
        # Images may come without a dimension of batches.
        axis = x.dim() - self.layers[name].weight.dim() + 1
        flat = x.movedim(axis, 0).flatten(1)
        if not flat.shape[1]:
            return
        ends = torch.stack(torch.aminmax(flat, dim=1))
        before = self.ends.get(name)
        self.ends[name] = ends if before is None else joined_ends(before, ends)
        known = self.values.get(name)
        wanted = min(
            _VALUES_OF_CALL, _VALUES - (0 if known is None else known.shape[1])
        )
        if wanted > 0:
            places = torch.randint(flat.shape[1], (wanted,), generator=self._random)
            some = flat[:, places.to(flat.device)]
            self.values[name] = some if known is None else torch.cat([known, some], 1)


# --- choosing -------------------------------------------------------------------------------------


def choose_even_channels_(
    runs: Runs,
    inputs: DepthwiseInputs,
    few: FewSamples,
    group: dist.ProcessGroup | None = None,
) -> EvenChoice:
    """Let quantizers of depthwise layers hold factors where the outputs are nearer to float then.

    Args:
        runs: a calibrated model, in eval mode.
        inputs: what its depthwise layers read.
        few: samples of its batches.
        group: processes that decide together.

    Returns:
        What was found out, with the outputs before and after it.
    """
    if not inputs.layers:
        return EvenChoice()
    sources = _sources(runs, inputs.layers, group)
    factors: dict[str, Tensor] = {}
    chosen: dict[str, EvenChannels] = {}
    for name, source in sources.items():
        # A layer that is not worth factors keeps the range that it has.
        with state_kept(inputs.layers[name].input_quantizer):
            best, gain = _best_factors(name, inputs, group)
        if gain >= _WORTH:
            factors[name] = best
            chosen[name] = EvenChannels(source, gain)
    if not chosen:
        return EvenChoice()

    def set_all() -> None:
        for name, best in factors.items():
            _hold_all_values_(name, inputs, group)
            _hold_(inputs.layers[name], best)

    held = [q for name in chosen for q in pair_of(inputs.layers[name])]
    choice = EvenChoice(chosen)
    return hold_if_nearer_(choice, runs, few, held, set_all, _LEAST_GAIN, group)


def _sources(
    runs: Runs, layers: Mapping[str, Any], group: dist.ProcessGroup | None
) -> dict[str, str]:
    """Return path of each layer that may hold factors -> path of the one that makes its channels.

    All ranks get those of the first that has a batch.
    """
    found: dict[str, str] = {}

    def step(_: int, batch: object) -> None:
        off = switched_off(quantizers(runs.model).values())
        try:
            with off:
                flow = record(
                    runs.model, None, is_leaf, forward=lambda *_: runs.call(batch)
                )
        except (RuntimeError, TorchqError, TypeError, AttributeError):
            return  # A forward may do what cannot be followed; no layer has factors then.
        found.update(_sources_in(runs.model, flow, layers))

    runs.again(step, 1)
    if group is None:
        return found
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, found, group=group)
    return next((of_rank for of_rank in gathered if of_rank), {})


def _sources_in(
    model: nn.Module, flow: Flow, layers: Mapping[str, Any]
) -> dict[str, str]:
    pairs, _ = find_pairs(model, flow, clipped=True)
    by_layer = {id(layer): name for name, layer in layers.items()}
    return {
        by_layer[id(pair.second)]: pair.names[0]
        for pair in pairs
        if id(pair.second) in by_layer
        and not _why_apart(model, flow, pair)
        and not why_no_factors(model, [pair.second])
    }


def _why_apart(model: nn.Module, flow: Flow, pair: Pair) -> str:
    """Return why the layer in front cannot have the factors in a file; "" if it can."""
    source, reader = pair.first, pair.second
    if not isinstance(source, OutputScaling) or isinstance(source, TRANSPOSED):
        return "it is no quantized convolution"
    if not isinstance(source, QuantModule) or source.quantizes_output:
        return "its result has a quantizer of its own"
    of_weight = source.weight_quantizer
    is_by_channel = (
        isinstance(of_weight, TensorQuantizer)
        and of_weight.quantizing
        and of_weight.descriptor.granularity == PerAxis((0,))
    )
    if not is_by_channel or source.weight_grid_obstacle():
        return "its weight has no scale for each output channel"
    if _end_of(reader.input_quantizer) > pair.clip:
        return "it is clipped below the end of the range"
    if math.isfinite(pair.clip) and reader.input_quantizer.descriptor.power_of_two:
        return "it is clipped, and codes with such a scale may lie beyond that"
    (current,) = flow.consumers(flow.calls_of(source)[0])
    while current.module is not reader:
        if any(q.quantizing for q in _quantizers_in(current.module)):
            return "a quantizer lies between"
        (current,) = flow.consumers(current)
    # A BatchNorm that is folded later takes no weight with factors.
    if any(isinstance(call.module, BATCH_NORMS) for call in flow.consumers(current)):
        return "a BatchNorm behind the depthwise layer is not folded"
    return ""


def _quantizers_in(module: nn.Module | None) -> list[TensorQuantizer]:
    parts = () if module is None else module.modules()
    return [part for part in parts if isinstance(part, TensorQuantizer)]


def _end_of(quantizer: TensorQuantizer) -> float:
    """Return the largest magnitude in the range of a quantizer."""
    return max(float(end.abs().max()) for _, end in quantizer.range.ends())


def _best_factors(
    name: str, inputs: DepthwiseInputs, group: dist.ProcessGroup | None
) -> tuple[Tensor, float]:
    """Return the factor of each channel with the least error, and the gain of all in dB.

    The range of the quantizer becomes that of all values.
    """
    layer = inputs.layers[name]
    quantizer = layer.input_quantizer
    ends = _hold_all_values_(name, inputs, group)
    values = inputs.values.get(name, ends.new_zeros(ends.shape[1], 0))
    errors = torch.stack([_errors(quantizer, values, 2.0**e) for e in _EXPONENTS])
    if group is not None:
        dist.all_reduce(errors, group=group)
    largest = ends.abs().amax(0).double()
    room = _BEYOND * _end_of(quantizer)
    best = torch.zeros_like(largest)
    least = errors[0].clone()
    for exponent, error in zip(_EXPONENTS, errors, strict=True):
        is_better = (error < least) & (largest * 2.0**exponent <= room)
        best = torch.where(is_better, float(exponent), best)
        least = torch.where(is_better, error, least)
    before, after = float(errors[0].sum()), float(least.sum())
    if not math.isfinite(before) or not after < before:
        return best.exp2(), 0.0
    gain = 10 * math.log10(before / after) if after else MOST_GAIN
    return best.exp2(), min(gain, MOST_GAIN)


def _hold_all_values_(
    name: str, inputs: DepthwiseInputs, group: dist.ProcessGroup | None
) -> Tensor:
    """Let the range of an input hold all values, where ends give it; return these by channel."""
    quantizer = inputs.layers[name].input_quantizer
    ends = _ends_of(name, inputs, group)
    if (inputs.method or quantizer.descriptor.calib_method) == BY_ENDS:
        quantizer.calibrate_on(ends, BY_ENDS)
    return ends


def _ends_of(
    name: str, inputs: DepthwiseInputs, group: dist.ProcessGroup | None
) -> Tensor:
    """Return the ends of the channels that a layer read, with 0, on all ranks."""
    layer = inputs.layers[name]
    none = layer.weight.new_zeros(2, layer.in_channels)
    ends = joined_ends(none, inputs.ends.get(name, none))
    return ends_of_ranks(ends, group)


def _errors(quantizer: TensorQuantizer, values: Tensor, factor: float) -> Tensor:
    """Return the squared error of the values of each channel, times a factor while rounded."""
    rounded = quantizer(values * factor) / factor
    return (rounded - values).double().square().sum(1)


def _hold_(layer: Any, factors: Tensor) -> None:
    """Let quantizers multiply what a layer reads by factors, and divide its weight by them."""
    of_input, of_weight = pair_of(layer)
    weight = layer.weight.detach()
    per_channel = factors.to(weight)
    pixels = [1] * (weight.dim() - 2)
    of_input.pre_quant_scale = per_channel.view(-1, *pixels)
    multiplier = weight.shape[0] // len(per_channel)
    of_output = per_channel.repeat_interleave(multiplier).reciprocal()
    of_weight.pre_quant_scale = of_output.view(-1, 1, *pixels)
    of_weight.calibrate_on(of_weight.scaled(weight))
