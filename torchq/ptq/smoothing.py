"""SmoothQuant: move outliers of activation channels into the weights that read them.

A norm in front takes the inverse factors where such layers alone read it. Elsewhere the quantizers
of input and weight can hold them: both are powers of two then, so every product has the bits that
it had, and the float model is the same one as long as the quantizers are off.

Reference: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models (ICML 2023), section 4.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.graph import Call, Flow, Forward, call_model, record
from torchq.nn import QuantModule, TensorQuantizer, switched_off, switched_on
from torchq.ptq.layers import SHARED, check_found
from torchq.utils import (
    device_of,
    evaluating,
    kept_batches,
    network_of,
    progress_bar,
    state_kept,
    watching,
)
from torchq.workflow import quantizers
from torchq.workflow.input_factors import pair_of, why_no_factors
from torchq.workflow.layer_changes import (
    change_checked,
    check_finite,
    check_not_calibrated,
    first_input,
    float_outputs,
    is_leaf,
    is_shared,
    largest_change,
    report_text,
    scale_,
    why_fixed,
)
from torchq.workflow.layer_matrices import channel_ranges, spread
from torchq.workflow.linear_factors import (
    channel_factors,
    hold_factors_,
    powers_of_two,
)

_ALPHAS = tuple(i / 10 for i in range(10))
# What stands for a norm where the quantizers hold the factors.
_OF_QUANTIZERS = "its quantizer"
# The relative change of a float32 output that is accepted.
_TOLERANCE = 1e-4
_REMEDY = "A norm may use its weight in another way than as a factor"
_NO_NORM = "its input is not that of a norm which only such layers read"
# Rows of the input of a layer that are kept in all.
_ROWS = 1024


@dataclass(frozen=True)
class SmoothedGroup:
    """Layers that read one tensor, and what was done.

    Attributes:
        layers: their paths.
        source: path of the norm that took the inverse factors, or that their quantizers did.
        alpha: the share of the difficulty that moved to the weights; None if nothing changed,
            because all factors would have made the error larger.
        spread_before: the largest over the median magnitude of the input channels.
        spread_after: the same afterwards.
    """

    layers: tuple[str, ...]
    source: str
    alpha: float | None
    spread_before: float
    spread_after: float


@dataclass(frozen=True)
class SmoothReport:
    """The result of :func:`smooth_`.

    Attributes:
        groups: what was smoothed, in running order.
        skipped: path of each quantized layer that was left alone -> the reason.
        error: the relative change of the float output on the first batch.
    """

    groups: tuple[SmoothedGroup, ...]
    skipped: Mapping[str, str]
    error: float

    def __str__(self) -> str:
        rows = []
        for group in self.groups:
            change = f"{group.spread_before:.3g} -> {group.spread_after:.3g}"
            alpha = "none" if group.alpha is None else f"{group.alpha:g}"
            rows.append((", ".join(group.layers), group.source, alpha, change))
        header = ("layers", "factors in", "alpha", "spread of channels")
        last = f"{len(self.groups)} inputs, output changed by {self.error:.1e}"
        return report_text(header, rows, self.skipped, last)


def smooth_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    alpha: float | Literal["auto"] = "auto",
    behind: Literal["norms", "anything"] = "norms",
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> SmoothReport:
    """Divide the input channels of quantized Linear layers behind norms by factors, in place.

    Call it after :func:`torchq.quantize_` and before :func:`torchq.calibrate`. The factor of
    channel j is ``max|x_j|^alpha / max|w_j|^(1 - alpha)`` (equation 4 of the paper); the weights
    are multiplied by it, and the LayerNorm or RMSNorm whose output they alone read takes the
    inverse factors; layers without such a norm are left alone. The float output stays the same,
    which is verified on the first batch. A call that fails changes nothing.

    With ``behind="anything"`` the quantizers of such other layers take the factors, as their
    ``pre_quant_scale``: powers of two, so that the weights stay what they are and the model has its
    float bits with the quantizers off. Files multiply the input of the layer then, and hold
    the codes of the weight with its factors.

    Args:
        model: a quantized model that is not calibrated.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        alpha: 0 leaves all difficulty in the activations, 1 moves all of it to the weights.
            ``"auto"`` searches 0.0, 0.1, ... 0.9 for each input, for the least error of the layers'
            outputs, and leaves an input as it is if all of these make the error larger.
        behind: which layers are treated: those behind ``"norms"`` alone, or behind ``"anything"``.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already, has no layer to treat, or alpha is out of
            range.
        CalibrationError: there is no batch, or an input is NaN or infinite.
        QuantizationError: the float output changed by more than rounding explains: 1e-4, or 8 units
            in the last place of dtypes of 16 bits.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
        >>> _ = torchq.quantize_(model, torchq.recipes.int8())
        >>> torchq.ptq.smooth_(model, [torch.randn(16, 8)], progress=False).groups[0].source
        '0'
    """
    model = network_of(model)
    if alpha != "auto" and not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
        raise ConfigError(f"smooth_: got alpha={alpha!r}; expected 0 to 1, or 'auto'")
    if behind not in ("norms", "anything"):
        raise ConfigError(
            f"smooth_: got behind={behind!r}; expected 'norms' or 'anything'"
        )
    check_not_calibrated("smooth_", model)
    kept_list = kept_batches("smooth_", batches, num_batches)
    with (
        torch.no_grad(),
        evaluating(model),
        switched_off(quantizers(model).values()),
    ):
        groups, skipped = _find_groups(model, kept_list[0], behind == "anything")
        check_found("smooth_", groups, skipped, "quantized Linear layers behind a norm")
        input_ranges = _observe_inputs(model, groups, kept_list, forward, progress)

        def change() -> list[SmoothedGroup]:
            return [
                _smooth(group, input_ranges[group.names[0]], alpha) for group in groups
            ]

        layers = [module for group in groups for module in group.changed]
        with_weights = [layer for group in groups for layer in group.layers]
        most = largest_change(_TOLERANCE, with_weights)
        outputs = partial(float_outputs, model)
        smoothed, error = change_checked(
            change,
            layers,
            partial(outputs, kept_list[0], forward),
            most,
            "smooth_",
            _REMEDY,
        )
    return SmoothReport(tuple(smoothed), skipped, error)


@dataclass(frozen=True)
class _Group:
    """Layers that read one tensor, and the norm that makes it for them alone; with their paths.

    Without a norm their quantizers take the factors.
    """

    names: tuple[str, ...]
    layers: tuple[Any, ...]
    source: str
    norm: Any

    @property
    def changed(self) -> list[nn.Module]:
        """The modules that factors change."""
        if self.norm is not None:
            return [*self.layers, self.norm]
        return [quantizer for layer in self.layers for quantizer in pair_of(layer)]


def _find_groups(
    model: nn.Module, example: object, by_quantizers: bool
) -> tuple[list[_Group], dict[str, str]]:
    """Return the groups in running order, and the layers that cannot be treated.

    The quantizers of ``model`` are off; ``example`` holds the arguments of one call. With
    ``by_quantizers`` those of layers without a norm take the factors.
    """
    flow = record(model, example, _is_leaf)
    chosen: dict[tuple[int, ...], list[Call]] = {}
    skipped: dict[str, str] = {
        name: "the first batch did not reach it"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and isinstance(module, QuantModule)
    }
    for call in flow.calls:
        if call.name in skipped and isinstance(call.module, nn.Linear):
            reason = _obstacle(model, flow, call.module)
            skipped[call.name] = reason or _NO_NORM
            if reason is None:
                chosen.setdefault(call.inputs, []).append(call)
    groups: list[_Group] = []
    for key, calls in chosen.items():
        source = _source(flow, key, calls)
        reason = ""
        if source is None and by_quantizers:
            reason = why_no_factors(model, [call.module for call in calls])
            skipped |= {call.name: reason for call in calls if reason}
        if source is not None or (by_quantizers and not reason):
            names, layers = zip(
                *((call.name, call.module) for call in calls), strict=True
            )
            path = _OF_QUANTIZERS if source is None else source.name
            norm = None if source is None else source.module
            groups.append(_Group(names, layers, path, norm))
            skipped = {
                name: reason for name, reason in skipped.items() if name not in names
            }
    return groups, skipped


def _is_leaf(module: nn.Module) -> bool:
    return is_leaf(module) or _is_norm(module)


def _obstacle(model: nn.Module, flow: Flow, layer: Any) -> str | None:
    """Return why the input channels of a layer cannot be scaled, or None."""
    if not isinstance(layer.input_quantizer, TensorQuantizer):
        return "its input is not quantized"
    return why_fixed(flow, layer) or (
        SHARED if is_shared(model, layer.weight) else None
    )


def _source(flow: Flow, key: tuple[int, ...], calls: list[Call]) -> Call | None:
    """Return the call of the norm that makes what exactly these calls read, or None."""
    source = flow.calls[key[0]] if len(key) == 1 else None
    norm: Any = None if source is None else source.module
    if (
        source is None
        or norm is None
        or not _is_norm(norm)
        or len(flow.calls_of(norm)) != 1
    ):
        return None
    readers = {reader.index for reader in flow.consumers(source)}
    if readers != {call.index for call in calls} or source.index in flow.outputs:
        return None
    layer: Any = calls[0].module
    return source if norm.weight.shape[0] == layer.weight.shape[1] else None


def _is_norm(module: nn.Module) -> bool:
    """Return True for LayerNorm and for RMSNorm, torch's or another library's."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    weight = getattr(module, "weight", None)
    return named and weight is not None and weight.dim() == 1


@dataclass
class _Inputs:
    """What a group reads: the largest magnitude of each channel, and some rows."""

    largest: Tensor
    samples: Tensor


def _observe_inputs(
    model: nn.Module,
    groups: list[_Group],
    batches: list[object],
    forward: Forward | None,
    progress: bool,
) -> dict[str, _Inputs]:
    """Run the float model and return what the first layer of each group reads."""
    moments_by_layer: dict[str, list[tuple[Tensor, Tensor]]] = {}
    each = max(1, _ROWS // len(batches))

    def note(name: str, args: Any, kwargs: Mapping[str, object], _: None) -> None:
        x = first_input(args, kwargs).detach().float()
        rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
        largest = torch.cat([rows.abs(), rows.new_zeros(1, rows.shape[1])]).amax(0)
        samples = rows[:: max(1, len(rows) // each)][:each].clone()
        moments_by_layer.setdefault(name, []).append((largest, samples))

    watched = [(group.layers[0], partial(note, group.names[0])) for group in groups]
    with watching(watched, before=True):
        for batch in progress_bar(batches, description="smooth_", enabled=progress):
            with state_kept(model):
                call_model(model, batch, forward=forward, device=device_of(model))
    result = {}
    for name, parts in moments_by_layer.items():
        largest = torch.stack([p[0] for p in parts])
        samples = torch.cat([p[1] for p in parts])
        result[name] = _Inputs(largest.amax(0), samples)
        check_finite(f"smooth_: {name}", len(samples), result[name].largest)
    return result


def _smooth(group: _Group, inputs: _Inputs, asked: float | str) -> SmoothedGroup:
    """Smooth one group in place."""
    ranges = [channel_ranges(layer, inputs=True).float() for layer in group.layers]
    columns = torch.stack(ranges).amax(0)

    def factors(exponent: float | None) -> Tensor:
        if exponent is None:
            return torch.ones_like(columns)
        chosen = channel_factors(inputs.largest, columns, exponent)
        return chosen if group.norm is not None else powers_of_two(chosen)

    alpha = (
        _best_alpha(group, inputs.samples, factors) if isinstance(asked, str) else asked
    )
    best_factors = factors(alpha)
    if alpha is not None:
        _set_factors(group, best_factors)
    before = spread(inputs.largest)
    after = spread(inputs.largest / best_factors)
    return SmoothedGroup(group.names, group.source, alpha, before, after)


def _set_factors(group: _Group, factors: Tensor) -> None:
    """Multiply the weights of a group by factors, and divide what they read by them."""
    if group.norm is None:
        hold_factors_(group.layers, factors)
        return
    for layer in group.layers:
        scale_(layer, factors, inputs=True)
    for parameter in (group.norm.weight, getattr(group.norm, "bias", None)):
        if parameter is not None:
            parameter.div_(factors.to(parameter.dtype))


def _best_alpha(
    group: _Group, samples: Tensor, factors: Callable[[float | None], Tensor]
) -> float | None:
    """Return the exponent with the least squared error of the outputs of a group, or None.

    The formats of its quantizers are tried with the largest magnitudes.
    """
    errors: dict[float | None, float] = {}
    for alpha in (None, *_ALPHAS):
        scale = factors(alpha)
        errors[alpha] = sum(_error(layer, samples, scale) for layer in group.layers)
    return min(errors, key=errors.__getitem__)


def _error(layer: Any, x: Tensor, factors: Tensor) -> float:
    """Return the squared error of the output of one layer with some factors."""
    weight = layer.weight.detach().float()
    pair = pair_of(layer)
    pair_quantizers = [q for q in pair if isinstance(q, TensorQuantizer)]
    with switched_on(pair_quantizers):
        # Before calibration they take the range of each call.
        output = pair[0](x / factors) @ pair[1](weight * factors).t()
    return float((output - x @ weight.t()).square().sum())
