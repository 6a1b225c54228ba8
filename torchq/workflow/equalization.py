"""Cross-layer equalization: give the channels between two layers similar ranges.

A layer whose output channels have very different ranges loses most of them in one range per
tensor. If only positively homogeneous functions lie between two layers, dividing an output channel
of the first by ``s > 0`` and multiplying the input channel of the second by ``s`` changes nothing
in float.

A depthwise layer has scales of its own for each channel of its weights, so its factors may look at
what it reads alone: all channels become as large. Up to the largest value that was seen such
factors pass a ReLU6 too, as long as none makes it clip what it did not.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.formats import PerTensor
from torchq.fusion.modules import is_layer
from torchq.graph import Call, Flow, Forward, call_model, record
from torchq.graph.operators import DROPOUTS, LAYERS, POOLS, TRANSPOSED
from torchq.nn import TensorQuantizer, switched_off
from torchq.utils import (
    device_of,
    evaluating,
    kept_batches,
    network_of,
    progress_bar,
    state_kept,
    untouched,
    watching,
)
from torchq.workflow.layer_changes import (
    change_checked,
    check_finite,
    check_not_calibrated,
    first_input,
    float_outputs,
    in_order,
    is_leaf,
    is_shared,
    largest_change,
    report_text,
    scale_,
    why_fixed,
)
from torchq.workflow.layer_matrices import channel_ranges, spread
from torchq.workflow.modes import quantizers

# The rounds over all pairs end when no factor differs from 1 by more, or after so many.
_CONVERGED, _ROUNDS = 1e-4, 20
# What keeps positive factors, element by element.
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, *DROPOUTS)
_HOMOGENEOUS_FUNCTIONS = frozenset(
    ["relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"]
)
# Pools do the same for the pixels of one channel.
_POOLING_FUNCTIONS = frozenset(
    f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)
)
_CLIPPING = ("relu6", "relu6_", "hardtanh", "hardtanh_")
# The functions among them whose ends are known: 0 and 6.
_CLIPPING_AT_6 = ("relu6", "relu6_")
# How many times the largest value that was seen a channel may reach until it is clipped. Where some
# channel is clipped at its full size, the others share its range: more room would cost them codes.
_ROOM, _ROOM_BESIDE_CLIPPED = 4.0, 1.25
# A channel below one code of 8 bits of the largest one grows as if it reached that.
_SMALLEST = 1 / 256
_OF_DEPTHWISE = "Leave it out: the network magnifies small changes"
# The relative change of a float32 output that is accepted.
_TOLERANCE = 1e-5
_REMEDY = (
    "Pass tolerance={:.0e} if rounding explains it, as in a network that magnifies small "
    "changes"
)


@dataclass(frozen=True)
class EqualizedPair:
    """Two layers whose common channels were equalized.

    Attributes:
        first: path of the layer that makes the channels.
        second: path of the layer that reads them.
        spread_before: the largest over the median magnitude of the output channels of ``first``.
        spread_after: the same afterwards.
    """

    first: str
    second: str
    spread_before: float
    spread_after: float


@dataclass(frozen=True)
class EqualizeReport:
    """The result of :func:`equalize_`.

    Attributes:
        pairs: the pairs that were equalized, in running order.
        skipped: path of each layer whose output was not equalized -> the reason.
        error: the relative change of the float output on the example.
    """

    pairs: tuple[EqualizedPair, ...]
    skipped: Mapping[str, str]
    error: float

    def __str__(self) -> str:
        rows = []
        for pair in self.pairs:
            change = f"{pair.spread_before:.3g} -> {pair.spread_after:.3g}"
            rows.append((f"{pair.first}, {pair.second}", change))
        last = f"{len(self.pairs)} pairs, output changed by {self.error:.1e}"
        return report_text(("layers", "spread of channels"), rows, self.skipped, last)


def equalize_(
    model: nn.Module,
    example: object,
    *,
    tolerance: float | None = None,
) -> EqualizeReport:
    """Equalize the ranges of channels between layers of ``model``, in place.

    Call it before :func:`torchq.calibrate`, on a float or a quantized model, after
    :func:`torchq.fuse_`. Layers are Conv, ConvTranspose and Linear, depthwise ones too; between
    them ReLU, LeakyReLU, PReLU, dropout and pooling may lie. ReLU6 and other functions that clip
    let no factors pass. The float output stays the same, which is verified on the example. A call
    that fails changes nothing.

    For each channel i between two layers the factor is ``sqrt(r1[i] * r2[i]) / r2[i]``, where r1
    and r2 are the largest magnitudes of the channel in the first and in the second weight
    (equation 11 of the paper). Afterwards both are equal. Because a layer may be the second of one
    pair and the first of the next, all pairs are treated repeatedly until nothing changes,
    20 times at most.

    Args:
        model: the model.
        example: arguments of one call; see :func:`torchq.graph.call_arguments`.
        tolerance: the largest relative change of the float output that is accepted; None means
            1e-5 for float32, and 8 units in the last place for dtypes of 16 bits.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already.
        QuantizationError: the float output changed by more than ``tolerance``.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> [pair.second for pair in torchq.ptq.equalize_(model, torch.rand(1, 4)).pairs]
        ['2']
    """
    model = network_of(model)
    check_not_calibrated("equalize_", model)
    with (
        torch.no_grad(),
        evaluating(model),
        switched_off(quantizers(model).values()),
    ):
        flow = record(model, example, is_leaf)
        pairs, skipped = find_pairs(model, flow)
        layers = _layers_of(pairs)
        most = largest_change(_TOLERANCE, layers) if tolerance is None else tolerance
        before = [spread(channel_ranges(pair.first)) for pair in pairs]

        def change() -> list[EqualizedPair]:
            for _ in range(_ROUNDS):
                if max(map(_equalize, pairs), default=0.0) < _CONVERGED:
                    break
            return [
                EqualizedPair(*pair.names, wide, spread(channel_ranges(pair.first)))
                for pair, wide in zip(pairs, before, strict=True)
            ]

        outputs = partial(float_outputs, model, example)
        equalized, error = change_checked(
            change, layers, outputs, most, "equalize_", _REMEDY
        )
    return EqualizeReport(tuple(equalized), skipped, error)


@dataclass(frozen=True)
class Pair:
    """Two layers, and their paths.

    Attributes:
        names: the paths.
        first: the layer that makes the channels.
        second: the layer that reads them.
        clip: where what lies between clips; infinite where nothing does.
    """

    names: tuple[str, str]
    first: Any
    second: Any
    clip: float = math.inf


def _layers_of(pairs: list[Pair]) -> list[Any]:
    return [layer for pair in pairs for layer in (pair.first, pair.second)]


def find_pairs(
    model: nn.Module, flow: Flow, *, clipped: bool = False
) -> tuple[list[Pair], dict[str, str]]:
    """Return the pairs of layers in running order, and why other layers are no first of a pair.

    With ``clipped`` a function that clips at 0 and above may lie between them.
    """
    layers = {name: m for name, m in model.named_modules() if is_layer(m)}
    obstacles = {m: _obstacle(model, flow, m) for m in layers.values()}
    skipped = {
        name: obstacles[m] or "the example did not reach it"
        for name, m in layers.items()
        if obstacles[m] or not flow.calls_of(m)
    }
    pairs: list[Pair] = []
    for call in flow.calls:
        if not is_layer(call.module) or call.name in skipped:
            continue
        second, clip, reason = _second_layer(flow, call, clipped)
        if second is not None:
            reason = obstacles[second.module]
            if reason is None and not _channels_agree(call.module, second.module):
                reason = f"{second.name} reads other channels"
        if reason is None and second is not None:
            names = (call.name, second.name)
            pairs.append(Pair(names, call.module, second.module, clip))
        elif reason is not None:
            skipped[call.name] = reason
    return pairs, in_order(model, skipped)


def _obstacle(model: nn.Module, flow: Flow, layer: nn.Module) -> str | None:
    """Return why a layer cannot be changed, or None."""
    shared = any(is_shared(model, p) for p in layer.parameters(recurse=False))
    reason = "it shares a parameter with another module" if shared else None
    return why_fixed(flow, layer) or reason


def _second_layer(
    flow: Flow, call: Call, clipped: bool
) -> tuple[Any, float, str | None]:
    """Return the call that alone reads the output of a layer, or the reason why there is none.

    Between the two is where it is clipped; infinite where nothing does.
    """
    # Pooling keeps its channels apart.
    is_image = not isinstance(call.module, nn.Linear)
    kinds = (*_HOMOGENEOUS, *(POOLS if is_image else ()))
    names = _HOMOGENEOUS_FUNCTIONS | (_POOLING_FUNCTIONS if is_image else frozenset())
    current = call
    flattened = False
    lowest_clip = math.inf
    while True:
        readers = flow.consumers(current)
        if current.index in flow.outputs:
            return None, lowest_clip, "its output is an output of the model"
        if len(readers) != 1:
            return None, lowest_clip, f"{len(readers)} operators read its output"
        current = readers[0]
        module = current.module
        if is_layer(module):
            if flattened and not isinstance(module, nn.Linear):
                reason = f"a flattened tensor is read by {current.name}"
                return None, lowest_clip, reason
            return current, lowest_clip, None
        is_flatten = isinstance(module, nn.Flatten) or current.name == "flatten"
        flattened = flattened or is_flatten
        clip = _clip_of(current) if clipped else None
        lowest_clip = lowest_clip if clip is None else min(lowest_clip, clip)
        keeps = current.name in names if module is None else isinstance(module, kinds)
        passes = is_flatten or keeps or clip is not None
        if not passes or len(current.inputs) > 1:
            clips = isinstance(module, nn.Hardtanh) or current.name in _CLIPPING
            remedy = ", because it clips; a ReLU in its place would" if clips else ""
            reason = f"{current.name} does not keep factors of channels{remedy}"
            return None, lowest_clip, reason


def _clip_of(call: Call) -> float | None:
    """Return where a function clips that is 0 for negative numbers and keeps all others below."""
    if call.module is None:
        return 6.0 if call.name in _CLIPPING_AT_6 else None
    if isinstance(call.module, nn.Hardtanh) and call.module.min_val == 0:
        return float(call.module.max_val)
    return None


def _channels_agree(first: nn.Module, second: nn.Module) -> bool:
    """Return True if the output channels of one layer are the input channels of the other."""
    is_linear = isinstance(first, nn.Linear), isinstance(second, nn.Linear)
    # A Linear may follow a convolution after flattening a single pixel of each channel.
    return is_linear != (True, False) and len(channel_ranges(first)) == len(
        channel_ranges(second, inputs=True)
    )


def _equalize(pair: Pair) -> float:
    """Equalize the channels between two layers; return the largest ``|log(factor)|``."""
    r1 = channel_ranges(pair.first).double()
    r2 = channel_ranges(pair.second, inputs=True).double()
    # A channel that is zero on either side has no range to equalize.
    factor = torch.where((r1 > 0) & (r2 > 0), (r1 * r2).sqrt() / r2, 1.0)
    scale_(pair.first, 1 / factor)
    scale_(pair.second, factor, inputs=True)
    return factor.log().abs().max().item() if factor.numel() else 0.0


# --- what depthwise layers read -------------------------------------------------------------------


def equalize_depthwise_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> EqualizeReport:
    """Make the channels that depthwise convolutions read as large as each other, in place.

    Call it before :func:`torchq.calibrate`, on a float or a quantized model, after
    :func:`torchq.fuse_`. A range for the whole tensor then has as many codes for each channel.
    Weights with a range for each output channel lose nothing by it, so others are left alone.
    Between a depthwise layer and the one in front of it may lie what :func:`equalize_` passes, and
    ReLU6 or a Hardtanh that begins at 0. No value of the batches is clipped that was not, and none
    that was is clipped elsewhere; what goes beyond the batches may be. The float output stays the
    same, which is verified on the first batch. A call that fails changes nothing.

    Args:
        model: the model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            Take those that calibrate.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report; its spreads are those of what the depthwise layers read.

    Raises:
        ConfigError: the model is calibrated already.
        CalibrationError: there is no batch, or a depthwise layer reads NaN or infinity.
        QuantizationError: the float output changed by more than rounding explains: 1e-5, or 8 units
            in the last place of dtypes of 16 bits.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Conv2d(3, 8, 1), torch.nn.ReLU6(), torch.nn.Conv2d(8, 8, 3, groups=8)
        ... )
        >>> batches = [torch.rand(2, 3, 8, 8)]
        >>> report = torchq.ptq.equalize_depthwise_(model, batches, progress=False)
        >>> [pair.second for pair in report.pairs]
        ['2']
    """
    where = "equalize_depthwise_"
    model = network_of(model)
    check_not_calibrated(where, model)
    kept_list = kept_batches(where, batches, num_batches)
    with (
        torch.no_grad(),
        evaluating(model),
        switched_off(quantizers(model).values()),
    ):
        pairs, skipped = _find_depthwise_pairs(model, kept_list[0], forward)
        sizes = _Sizes(pairs)
        with sizes.recording():
            for batch in progress_bar(kept_list, description=where, enabled=progress):
                with state_kept(model):
                    call_model(model, batch, forward=forward, device=device_of(model))

        def change() -> list[EqualizedPair]:
            return [_equalize_input(pair, *sizes.of(pair)) for pair in pairs]

        layers = _layers_of(pairs)
        outputs = partial(float_outputs, model, kept_list[0], forward)
        most = largest_change(_TOLERANCE, layers)
        equalized, error = change_checked(
            change, layers, outputs, most, where, _OF_DEPTHWISE
        )
    return EqualizeReport(tuple(equalized), skipped, error)


def evened_layers(
    model: nn.Module, example: object, *, depthwise: bool
) -> tuple[str, ...]:
    """Return the paths of the layers for which factors would even out what they read.

    Args:
        model: float or quantized, calibrated or not; left unchanged.
        example: arguments of one call.
        depthwise: by :func:`equalize_depthwise_`; else by :func:`equalize_`.
    """
    with untouched(model), switched_off(quantizers(model).values()):
        if depthwise:
            pairs, _ = _find_depthwise_pairs(model, example, None)
        else:
            pairs, _ = find_pairs(model, record(model, example, is_leaf))
    return tuple(pair.names[1] for pair in pairs)


def _find_depthwise_pairs(
    model: nn.Module, example: object, forward: Forward | None
) -> tuple[list[Pair], dict[str, str]]:
    """Return the pairs whose second layer is depthwise, and why others of these are in none."""
    flow = record(model, example, is_leaf, forward=forward)
    all_pairs, reasons = find_pairs(model, flow, clipped=True)
    behind = {pair.second: pair for pair in all_pairs}
    pairs: list[Pair] = []
    skipped: dict[str, str] = {}
    for name, layer in model.named_modules():
        if not is_layer(layer) or not is_depthwise(layer):
            continue
        pair = behind.get(layer)
        reason = (
            _why_in_no_pair(flow, layer, reasons)
            if pair is None
            else _why_of_ranges(pair)
        )
        if reason is not None:
            skipped[name] = reason
        elif pair is not None:
            pairs.append(pair)
    return pairs, skipped


def is_depthwise(layer: Any) -> bool:
    """Return True for a convolution whose every output channel reads one input channel."""
    is_plain = isinstance(layer, LAYERS) and not isinstance(layer, TRANSPOSED)
    groups = getattr(layer, "groups", 1)
    return is_plain and groups > 1 and groups == layer.in_channels


def _why_in_no_pair(flow: Flow, layer: nn.Module, reasons: Mapping[str, str]) -> str:
    """Return why no layer in front of a depthwise one can take the inverse factors."""
    calls = flow.calls_of(layer)
    if not calls:
        return "the first batch did not reach it"
    current = calls[0]
    while len(current.inputs) == 1:
        current = flow.calls[current.inputs[0]]
        if is_layer(current.module):
            break
    if current is calls[0] or not is_layer(current.module):
        return "no layer alone makes its input"
    return f"behind {current.name}: {reasons.get(current.name, 'its channels differ')}"


def _why_of_ranges(pair: Pair) -> str | None:
    """Return why factors would gain nothing, or cost more, with the ranges that there are."""
    for name, layer in zip(pair.names, (pair.first, pair.second), strict=True):
        quantizer = getattr(layer, "weight_quantizer", None)
        if isinstance(quantizer, TensorQuantizer) and _is_whole(quantizer):
            return f"the weight of {name} has one range for all channels"
    quantizer = getattr(pair.second, "input_quantizer", None)
    if isinstance(quantizer, TensorQuantizer) and not _is_whole(quantizer):
        return "its input has ranges of its own for channels"
    return None


def _is_whole(quantizer: TensorQuantizer) -> bool:
    return quantizer.descriptor.granularity == PerTensor()


class _Sizes:
    """The largest magnitude of each channel between the layers of pairs, over all batches."""

    def __init__(self, pairs: list[Pair]) -> None:
        self._pairs = pairs
        self._made: dict[nn.Module, Tensor] = {}
        self._read: dict[nn.Module, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at what passes between the layers inside the ``with`` block."""
        makers = [(p.first, partial(self._see_made, p.first)) for p in self._pairs]
        readers = [(p.second, partial(self._see_read, p.second)) for p in self._pairs]
        with watching(makers), watching(readers, before=True):
            yield

    def _see_made(self, layer: nn.Module, _: Any, __: Any, out: Tensor) -> None:
        # What is clipped above is 0 for negative numbers.
        _note(self._made, layer, out.detach().clamp(min=0))

    def _see_read(self, layer: nn.Module, args: Any, kwargs: Any, _: None) -> None:
        _note(self._read, layer, first_input(args, kwargs).detach().abs())

    def of(self, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return the sizes of what the first layer makes, and of what the second reads."""
        made, read = self._made.get(pair.first), self._read.get(pair.second)
        where = f"equalize_depthwise_: {pair.names[1]}"
        if made is None or read is None:
            raise CalibrationError(
                f"{where}: got batches without values; expected at least one image"
            )
        check_finite(where, len(read), made, read)
        return made, read


def _note(sizes: dict[nn.Module, Tensor], layer: Any, magnitudes: Tensor) -> None:
    """Widen the sizes of the channels of a layer by those of a call."""
    if not magnitudes.numel():
        return
    # Images may come without a dimension of batches.
    channels = magnitudes.dim() - layer.weight.dim() + 1
    largest = magnitudes.movedim(channels, 0).flatten(1).amax(1).double()
    before = sizes.get(layer)
    sizes[layer] = largest if before is None else torch.maximum(before, largest)


def _equalize_input(pair: Pair, made: Tensor, read: Tensor) -> EqualizedPair:
    """Make the channels that a depthwise layer reads as large as each other."""
    factor = _factors(made, read, pair.clip)
    scale_(pair.first, factor)
    scale_(pair.second, 1 / factor, inputs=True)
    return EqualizedPair(*pair.names, spread(read), spread(read * factor))


def _factors(made: Tensor, read: Tensor, clip: float) -> Tensor:
    """Return the factor of each channel.

    Args:
        made: what each reaches before it is clipped.
        read: what the depthwise layer reads of it.
        clip: where it is clipped.
    """
    largest = read.max()
    is_clipped = made >= clip
    # What no channel is clipped at is no bound for their common size.
    room = _ROOM_BESIDE_CLIPPED if bool(is_clipped.any()) else _ROOM
    size = largest.clamp(max=clip / room)
    factor = size / read.clamp(min=float(largest) * _SMALLEST)
    # Pools may read less than what is clipped before them.
    factor = torch.minimum(factor, clip / room / made.clamp(min=1e-30))
    # What is clipped stays; a channel of zeros has no range, and may hold a bias below zero.
    return torch.where(is_clipped | (read == 0), 1.0, factor)
