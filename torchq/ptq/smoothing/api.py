"""SmoothQuant: move outliers of activation channels into the weights that read them.

Reference: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models (ICML 2023), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.graph import call_model, tensors_in
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.modes import quantizers_off
from torchq.ptq.smoothing.groups import SmoothingGroup, find_groups
from torchq.ptq.smoothing.scales import best_alpha, smoothing_scale
from torchq.utils import device_of, evaluating, progress_bar, table
from torchq.workflow import quantizers

__all__ = ["SmoothReport", "SmoothedGroup", "smooth_"]

#: Rows of each input that the search for alpha keeps.
_ROWS = 1024


@dataclass(frozen=True)
class SmoothedGroup:
    """Layers that read one tensor, and what was done.

    Attributes:
        layers: their paths.
        norm: path of the norm that took the inverse factors; None if the input quantizers did.
        alpha: the share of the difficulty that moved to the weights.
        spread_before: the largest over the median magnitude of the input channels.
        spread_after: the same afterwards.
    """

    layers: tuple[str, ...]
    norm: str | None
    alpha: float
    spread_before: float
    spread_after: float


@dataclass(frozen=True)
class SmoothReport:
    """The result of :func:`smooth_`.

    Attributes:
        groups: what was smoothed, in running order.
        skipped: path of each quantized Linear that was left alone -> the reason.
        error: the relative change of the float output on the first batch.
    """

    groups: tuple[SmoothedGroup, ...]
    skipped: Mapping[str, str]
    error: float

    def __str__(self) -> str:
        rows = [("layers", "factors in", "alpha", "spread of channels")]
        for group in self.groups:
            spread = f"{group.spread_before:.3g} -> {group.spread_after:.3g}"
            where = group.norm or "input quantizer"
            rows.append((", ".join(group.layers), where, f"{group.alpha:g}", spread))
        rows += [(name, "", "", f"SKIPPED: {reason}") for name, reason in self.skipped.items()]
        return f"{table(rows)}\n{len(self.groups)} inputs, output changed by {self.error:.1e}"


def smooth_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    alpha: float | Literal["auto"] = "auto",
    tolerance: float = 1e-4,
    run: RunOptions | None = None,
    progress: bool = True,
) -> SmoothReport:
    """Divide the input channels of quantized Linear layers by factors, in place.

    Call it after :func:`torchq.quantize_` and before :func:`torchq.calibrate`. The factor of
    channel j is ``max|x_j|^alpha / max|w_j|^(1 - alpha)`` (equation 4 of the paper); the weights
    are multiplied by it. A LayerNorm or RMSNorm whose output only such layers read takes the
    inverse factors; elsewhere the input quantizer multiplies by them (``pre_quant_scale``). The
    float output stays the same, which is verified on the first batch. A call that fails changes
    nothing.

    Args:
        model: a quantized model that is not calibrated.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        alpha: 0 leaves all difficulty in the activations, 1 moves all of it to the weights.
            ``"auto"`` searches 0.0, 0.1, ... 0.9 for each input, for the least error of the layers'
            outputs.
        tolerance: the largest relative change of the float output that is accepted.
        run: how the model is run; see :class:`RunOptions`.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already, has no quantized Linear layer, or alpha is
            out of range.
        CalibrationError: there is no batch, or an input is NaN or infinite.
        QuantizationError: the float output changed by more than ``tolerance``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
        >>> _ = torchq.quantize_(model, torchq.recipes.int8())
        >>> torchq.ptq.smooth_(model, [torch.randn(16, 8)], progress=False).groups[0].norm
        '0'
    """
    _check(model, alpha)
    run = run or RunOptions()
    kept = list(islice(batches, run.num_batches))
    if not kept:
        raise CalibrationError("smooth_: got no batch; expected at least one")
    with torch.no_grad(), evaluating(model), quantizers_off(model):
        groups, skipped = find_groups(model, kept[0])
        if not groups:
            reasons = "; ".join(f"{name}: {text}" for name, text in list(skipped.items())[:3])
            raise ConfigError(
                f"smooth_: got no layer to treat ({reasons or 'none is quantized'}); expected "
                "quantized Linear layers. Run torchq.quantize_ first"
            )
        seen = _observe(model, groups, kept, run, progress)
        expected = _outputs(model, kept[0], run)
        with _restored_on_error(groups):
            done = [_smooth(group, seen[group.layers[0][0]], alpha) for group in groups]
            error = _relative_error(_outputs(model, kept[0], run), expected)
            if not error <= tolerance:
                raise QuantizationError(
                    f"smooth_: the float output changed by {error:.1e}, relative; expected at most "
                    f"{tolerance:.1e}. The model is as before. A norm may use its weight in "
                    "another way than as a factor"
                )
    return SmoothReport(tuple(done), skipped, error)


def _check(model: nn.Module, alpha: float | str) -> None:
    """Raise an error for a calibrated model or an alpha out of range."""
    if alpha != "auto" and not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
        raise ConfigError(f"smooth_: got alpha={alpha!r}; expected 0 to 1, or 'auto'")
    known = [name for name, q in quantizers(model).items() if q.calibrated]
    if known:
        raise ConfigError(
            f"smooth_: got a calibrated model ({known[0]} has a range), whose ranges would be "
            "wrong afterwards; expected a call before torchq.calibrate"
        )


@dataclass
class _Seen:
    """The inputs of one group: the largest magnitude of each channel, and some rows."""

    largest: Tensor
    rows: Tensor


def _observe(
    model: nn.Module,
    groups: list[SmoothingGroup],
    batches: list[Any],
    run: RunOptions,
    progress: bool,
) -> dict[str, _Seen]:
    """Run the float model and return what the first layer of each group reads."""
    found: dict[str, _Seen] = {}
    each = max(1, _ROWS // len(batches))

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = (args[0] if args else kwargs["input"]).detach().flatten(0, -2).float()
            largest, rows = x.abs().amax(0), x[:: max(1, len(x) // each)][:each].clone()
            old = found.get(name)
            if old is not None:
                largest = torch.maximum(old.largest, largest)
                rows = torch.cat([old.rows, rows])
            found[name] = _Seen(largest, rows)

        return hook

    with ExitStack() as stack:
        for group in groups:
            name, layer = group.layers[0]
            hook = layer.register_forward_pre_hook(hook_for(name), with_kwargs=True)
            stack.callback(hook.remove)
        for batch in progress_bar(batches, description="smooth_", enabled=progress):
            call_model(model, batch, forward=run.forward, device=device_of(model))
    for name, seen in found.items():
        if not bool(seen.largest.isfinite().all()):
            raise CalibrationError(
                f"smooth_: {name}: got NaN or infinite inputs; expected finite ones. Check the "
                "batches and the layers before"
            )
    return found


def _smooth(group: SmoothingGroup, seen: _Seen, alpha: float | str) -> SmoothedGroup:
    """Smooth one group in place."""
    weights = [layer.weight.detach().float() for _, layer in group.layers]
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    if isinstance(alpha, str):
        alpha = best_alpha(group, seen.rows, seen.largest, largest)
    scale = smoothing_scale(seen.largest, largest, alpha)
    for _, layer in group.layers:
        layer.weight.mul_(scale.to(layer.weight.dtype))
        if group.norm is None:
            inverse = (1 / scale).to(layer.weight.dtype)
            old = layer.input_quantizer.pre_quant_scale
            layer.input_quantizer.pre_quant_scale = inverse if old is None else old * inverse
    if group.norm is not None:
        for parameter in (group.norm[1].weight, getattr(group.norm[1], "bias", None)):
            if parameter is not None:
                parameter.div_(scale.to(parameter.dtype))
    names = tuple(name for name, _ in group.layers)
    norm = None if group.norm is None else group.norm[0]
    return SmoothedGroup(names, norm, alpha, _spread(seen.largest), _spread(seen.largest / scale))


def _spread(largest: Tensor) -> float:
    """Return the largest over the median magnitude of the channels that are not zero."""
    live = largest[largest > 0]
    return (live.max() / live.median()).item() if live.numel() else 1.0


def _outputs(model: nn.Module, batch: Any, run: RunOptions) -> list[Tensor]:
    out = call_model(model, batch, forward=run.forward, device=device_of(model))
    return [tensor.double() for tensor in tensors_in(out) if tensor.is_floating_point()]


def _relative_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    errors = [((f - e).norm() / e.norm().clamp(min=1e-30)).item() for f, e in pairs]
    return max(errors, default=0.0)


@contextmanager
def _restored_on_error(groups: list[SmoothingGroup]) -> Iterator[None]:
    """Bring weights and factors back if anything ends the block early."""
    modules = [m for group in groups for m in group.modules()]
    before = [(p, p.detach().clone()) for m in modules for p in m.parameters(recurse=False)]
    layers = [layer for group in groups for _, layer in group.layers]
    scales = [(layer.input_quantizer, layer.input_quantizer.pre_quant_scale) for layer in layers]
    try:
        yield
    except BaseException:
        for parameter, value in before:
            parameter.copy_(value)
        for quantizer, scale in scales:
            quantizer.pre_quant_scale = scale
        raise
