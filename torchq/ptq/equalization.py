"""Cross-layer equalization: give the channels between two layers similar ranges.

A layer whose output channels have very different ranges loses most of them in one range per
tensor. If only positively homogeneous functions lie between two layers, dividing an output channel
of the first by ``s > 0`` and multiplying the input channel of the second by ``s`` changes nothing
in float.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.fusion.modules import is_layer
from torchq.graph import Call, Flow, record
from torchq.graph.operators import DROPOUTS, POOLS
from torchq.nn import switched_off
from torchq.ptq.layers import (
    change_checked,
    check_not_calibrated,
    float_outputs,
    in_order,
    is_leaf,
    is_shared,
    largest_change,
    report_text,
    scale_,
    why_fixed,
)
from torchq.utils import evaluating, network_of
from torchq.workflow import quantizers
from torchq.workflow.layer_matrices import channel_ranges, spread

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
        pairs, skipped = _find_pairs(model, flow)
        layers = [layer for pair in pairs for layer in (pair.first, pair.second)]
        most = largest_change(1e-5, layers) if tolerance is None else tolerance
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
class _Pair:
    """Two layers, and their paths."""

    names: tuple[str, str]
    first: object
    second: object


def _find_pairs(model: nn.Module, flow: Flow) -> tuple[list[_Pair], dict[str, str]]:
    """Return the pairs of layers in running order, and why other layers are no first of a pair."""
    layers = {name: m for name, m in model.named_modules() if is_layer(m)}
    obstacles = {m: _obstacle(model, flow, m) for m in layers.values()}
    skipped = {
        name: obstacles[m] or "the example did not reach it"
        for name, m in layers.items()
        if obstacles[m] or not flow.calls_of(m)
    }
    pairs: list[_Pair] = []
    for call in flow.calls:
        if not is_layer(call.module) or call.name in skipped:
            continue
        second, reason = _second_layer(flow, call)
        if second is not None:
            reason = obstacles[second.module]
            if reason is None and not _channels_agree(call.module, second.module):
                reason = f"{second.name} reads other channels"
        if reason is None and second is not None:
            pairs.append(_Pair((call.name, second.name), call.module, second.module))
        elif reason is not None:
            skipped[call.name] = reason
    return pairs, in_order(model, skipped)


def _obstacle(model: nn.Module, flow: Flow, layer: nn.Module) -> str | None:
    """Return why a layer cannot be changed, or None."""
    shared = any(is_shared(model, p) for p in layer.parameters(recurse=False))
    reason = "it shares a parameter with another module" if shared else None
    return why_fixed(flow, layer) or reason


def _second_layer(flow: Flow, call: Call) -> tuple[Any, str | None]:
    """Return the call that alone reads the output of a layer, or the reason why there is none."""
    # Pooling keeps its channels apart.
    is_image = not isinstance(call.module, nn.Linear)
    kinds = (*_HOMOGENEOUS, *(POOLS if is_image else ()))
    names = _HOMOGENEOUS_FUNCTIONS | (_POOLING_FUNCTIONS if is_image else frozenset())
    current = call
    flattened = False
    while True:
        readers = flow.consumers(current)
        if current.index in flow.outputs:
            return None, "its output is an output of the model"
        if len(readers) != 1:
            return None, f"{len(readers)} operators read its output"
        current = readers[0]
        module = current.module
        if is_layer(module):
            if flattened and not isinstance(module, nn.Linear):
                return None, f"a flattened tensor is read by {current.name}"
            return current, None
        is_flatten = isinstance(module, nn.Flatten) or current.name == "flatten"
        flattened = flattened or is_flatten
        keeps = current.name in names if module is None else isinstance(module, kinds)
        if not (is_flatten or keeps) or len(current.inputs) > 1:
            clips = isinstance(module, nn.Hardtanh) or current.name in _CLIPPING
            remedy = ", because it clips; a ReLU in its place would" if clips else ""
            return None, f"{current.name} does not keep factors of channels{remedy}"


def _channels_agree(first: nn.Module, second: nn.Module) -> bool:
    """Return True if the output channels of one layer are the input channels of the other."""
    is_linear = isinstance(first, nn.Linear), isinstance(second, nn.Linear)
    # A Linear may follow a convolution after flattening a single pixel of each channel.
    return is_linear != (True, False) and len(channel_ranges(first)) == len(
        channel_ranges(second, inputs=True)
    )


def _equalize(pair: _Pair) -> float:
    """Equalize the channels between two layers; return the largest ``|log(factor)|``."""
    r1 = channel_ranges(pair.first).double()
    r2 = channel_ranges(pair.second, inputs=True).double()
    # A channel that is zero on either side has no range to equalize.
    factor = torch.where((r1 > 0) & (r2 > 0), (r1 * r2).sqrt() / r2, 1.0)
    scale_(pair.first, 1 / factor)
    scale_(pair.second, factor, inputs=True)
    return factor.log().abs().max().item() if factor.numel() else 0.0
