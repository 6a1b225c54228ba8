"""Cross-layer equalization: give the channels between two layers similar ranges.

A layer whose output channels have very different ranges loses most of them in one range per
tensor. If only positively homogeneous functions lie between two layers, dividing an output channel
of the first by ``s > 0`` and multiplying the input channel of the second by ``s`` changes nothing
in float.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError, QuantizationError
from torchq.graph import Call, Flow, is_torch_leaf, record
from torchq.nn import QuantModule, quantizing_only
from torchq.ptq.channels import (
    LAYERS,
    float_outputs,
    input_ranges,
    keeps_factors,
    largest_change,
    relative_change,
    scale_inputs_,
    scale_outputs_,
)
from torchq.ptq.layers import (
    check_not_calibrated,
    is_shared,
    own_tensors,
    report_text,
    why_fixed,
)
from torchq.utils import evaluating, undone_on_error
from torchq.workflow import quantizers
from torchq.workflow.layer_matrices import output_ranges, spread

# The iterations end when no factor differs from 1 by more.
_CONVERGED = 1e-4


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
    example: Any,
    *,
    iterations: int = 20,
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
    pair and the first of the next, all pairs are treated repeatedly until nothing changes.

    Args:
        model: the model.
        example: arguments of one call; see :func:`torchq.graph.call_arguments`.
        iterations: the largest number of rounds over all pairs, at least 1.
        tolerance: the largest relative change of the float output that is accepted; None means
            1e-5 for float32, and 8 units in the last place for dtypes of 16 bits.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already, or ``iterations`` is below 1.
        QuantizationError: the float output changed by more than ``tolerance``.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> [pair.second for pair in torchq.ptq.equalize_(model, torch.rand(1, 4)).pairs]
        ['2']
    """
    if iterations < 1:
        raise ConfigError(f"equalize_: got iterations={iterations}; expected at least 1")
    check_not_calibrated("equalize_", model)
    with torch.no_grad(), evaluating(model), quantizing_only(quantizers(model).values()):
        flow = record(model, example, lambda m: is_torch_leaf(m) or isinstance(m, QuantModule))
        pairs, skipped = _find_pairs(model, flow)
        expected = float_outputs(model, example)
        most = tolerance
        if most is None:
            most = largest_change(1e-5, pairs[0].first.weight.dtype) if pairs else 0.0
        layers = [layer for pair in pairs for layer in (pair.first, pair.second)]
        with undone_on_error(*layers, written=own_tensors(layers)):
            before = [spread(output_ranges(pair.first)) for pair in pairs]
            _equalize_all(pairs, iterations)
            error = relative_change(float_outputs(model, example), expected)
            if not error <= most:
                raise QuantizationError(
                    f"equalize_: the float output changed by {error:.1e}, relative; expected at "
                    f"most {most:.1e}. The model is as before. Pass tolerance={2 * error:.0e} if "
                    "rounding explains it, as in a network that magnifies small changes"
                )
            after = [
                EqualizedPair(*pair.names, wide, spread(output_ranges(pair.first)))
                for pair, wide in zip(pairs, before, strict=True)
            ]
    return EqualizeReport(tuple(after), skipped, error)


@dataclass(frozen=True)
class _Pair:
    """Two layers, and their paths."""

    names: tuple[str, str]
    first: Any
    second: Any


def _find_pairs(model: nn.Module, flow: Flow) -> tuple[list[_Pair], dict[str, str]]:
    """Return the pairs of layers in running order, and why other layers are no first of a pair."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, LAYERS)}
    obstacles = {id(m): _obstacle(model, flow, m) for m in layers.values()}
    pairs: list[_Pair] = []
    skipped: dict[str, str] = {}
    for call in flow.calls:
        if not isinstance(call.module, LAYERS) or call.name in skipped:
            continue
        reason = obstacles.get(id(call.module))
        second = None
        if reason is None:
            second, reason = _second_layer(flow, call)
        if second is not None and second.module is not None:
            reason = obstacles.get(id(second.module))
            if reason is None and not _channels_agree(call.module, second.module):
                reason = f"{second.name} reads other channels"
            if reason is None:
                names = call.name, second.name
                pairs.append(_Pair(names, call.module, second.module))
        if reason is not None:
            skipped[call.name] = reason
    reached = {id(call.module) for call in flow.calls}
    for name, module in layers.items():
        if id(module) not in reached:
            skipped[name] = obstacles[id(module)] or "the example did not reach it"
    return pairs, skipped


def _obstacle(model: nn.Module, flow: Flow, layer: nn.Module) -> str | None:
    """Return why a layer cannot be changed, or None."""
    shared = any(is_shared(model, p) for p in layer.parameters(recurse=False))
    reason = "it shares a parameter with another module" if shared else None
    return why_fixed(flow, layer) or reason


def _second_layer(flow: Flow, call: Call) -> tuple[Call | None, str | None]:
    """Return the layer that alone reads the output of ``call``, or the reason why there is none."""
    is_convolution = not isinstance(call.module, nn.Linear)
    current, flattened = call, False
    while True:
        readers = flow.consumers(current)
        if current.index in flow.outputs:
            return None, "its output is an output of the model"
        if len(readers) != 1:
            return None, f"{len(readers)} operators read its output"
        current = readers[0]
        if isinstance(current.module, LAYERS):
            if flattened and not isinstance(current.module, nn.Linear):
                return None, f"a flattened tensor is read by {current.name}"
            return current, None
        is_flatten = isinstance(current.module, nn.Flatten) or current.name == "flatten"
        flattened = flattened or is_flatten
        if not (is_flatten or keeps_factors(current, is_convolution)) or len(current.inputs) > 1:
            return None, f"{current.name} does not keep factors of channels{_remedy(current)}"


def _remedy(call: Call) -> str:
    """Return what to add to the reason for a call that clips."""
    clips = isinstance(call.module, nn.Hardtanh) or (
        call.module is None and call.name.removesuffix("_") in ("relu6", "hardtanh")
    )
    return ", because it clips; a ReLU in its place would" if clips else ""


def _channels_agree(first: nn.Module, second: nn.Module) -> bool:
    """Return True if the output channels of one layer are the input channels of the other."""
    is_linear = isinstance(first, nn.Linear), isinstance(second, nn.Linear)
    # A Linear may follow a convolution after flattening a single pixel of each channel.
    return is_linear != (True, False) and len(output_ranges(first)) == len(input_ranges(second))


def _equalize_all(pairs: list[_Pair], iterations: int) -> None:
    """Equalize all pairs until nothing changes."""
    for _ in range(iterations):
        largest = max((_equalize(pair) for pair in pairs), default=0.0)
        if largest < _CONVERGED:
            break


def _equalize(pair: _Pair) -> float:
    """Equalize the channels between two layers; return the largest ``|log(factor)|``."""
    r1, r2 = output_ranges(pair.first).double(), input_ranges(pair.second).double()
    # A channel that is zero on either side has no range to equalize.
    factor = torch.where((r1 > 0) & (r2 > 0), (r1 * r2).sqrt() / r2, 1.0)
    scale_outputs_(pair.first, 1 / factor)
    scale_inputs_(pair.second, factor)
    return factor.log().abs().max().item() if factor.numel() else 0.0
