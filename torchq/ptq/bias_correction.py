"""Bias correction: remove the mean error that quantization adds to the output of a layer.

Rounding the weights of an output channel, and rounding or clipping its input, shifts the mean of
the channel. The bias can take this shift back at no cost.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.2 and appendix D.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.fusion.modules import TRANSPOSED
from torchq.graph import Forward, call_model
from torchq.nn import quantizing_only
from torchq.ptq.layers import (
    LAYERS,
    check_calibrated,
    check_finite,
    check_found,
    in_order,
    report_text,
    weighted_modules,
)
from torchq.utils import (
    device_of,
    evaluating,
    kept_batches,
    progress_bar,
    undone_on_error,
    watching,
)
from torchq.workflow import quantizers


@dataclass(frozen=True)
class BiasReport:
    """The result of :func:`correct_bias_`.

    Attributes:
        corrections: path of each layer whose bias changed -> the root mean square of the change
            over that of the mean outputs of its channels.
        skipped: path of each quantized layer that was left alone -> the reason.
        batches: the number of batches that were read.
    """

    corrections: Mapping[str, float]
    skipped: Mapping[str, str]
    batches: int

    def __str__(self) -> str:
        rows = [(name, f"{change:.2%}") for name, change in self.corrections.items()]
        header = ("layer", "change of the bias, relative to the mean output")
        last = f"{len(self.corrections)} biases from {self.batches} batches"
        return report_text(header, rows, self.skipped, last)


def correct_bias_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: Literal["empirical", "analytic"] = "empirical",
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> BiasReport:
    """Correct the biases of the quantized layers of ``model``, in place; no labels are needed.

    Calibrate first. Layers are corrected in the order in which they run. A call that fails or is
    interrupted changes nothing.

    Args:
        model: a calibrated model whose BatchNorms are fused (:func:`torchq.fuse_`).
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            All are kept in memory.
        method: ``"empirical"`` compares the mean outputs of the float and of the quantized model,
            one layer after the other, so that each layer also takes back what the layers before
            it add. It runs the batches once for each layer. ``"analytic"`` computes the shift
            ``(quantized weight - weight) * mean input``, which rounding the weights alone makes;
            it runs the batches once, and leaves ConvTranspose layers alone.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: the model has no quantized layer with a bias, an input is not calibrated, or
            the method is unknown.
        CalibrationError: there is no batch, or an output is NaN or infinite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(16, 4)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> torchq.ptq.correct_bias_(model, batches, progress=False).batches
        1
    """
    if method not in ("empirical", "analytic"):
        raise ConfigError(
            f"correct_bias_: got method={method!r}; expected 'empirical' or 'analytic'"
        )
    layers, skipped = _find_layers(model, method)
    check_calibrated("correct_bias_", model)
    kept = kept_batches("correct_bias_", batches, num_batches)
    of_inputs, run = method == "analytic", partial(_means, model, kept, forward)
    with (
        torch.no_grad(),
        evaluating(model),
        undone_on_error(written=[layer.bias for layer in layers.values()]),
    ):
        with quantizing_only(quantizers(model).values()):
            float_means = run(layers, of_inputs)
        skipped |= dict.fromkeys(layers.keys() - float_means.keys(), "no batch reached it")
        corrections = {}
        for name, mean in progress_bar(
            list(float_means.items()), description="correct_bias_", enabled=progress, unit="layer"
        ):
            layer = layers[name]
            if of_inputs:
                ((quantizer, weight),) = layer.quantized_weights()
                change = -_product(layer, (quantizer(weight) - weight).double(), mean)
                size = _product(layer, weight.double(), mean) + layer.bias.double()
            else:
                change, size = mean - run({name: layer}, of_inputs)[name], mean
            layer.bias += change.to(layer.bias)
            corrections[name] = _root_mean_square(change) / max(_root_mean_square(size), 1e-30)
    return BiasReport(corrections, in_order(model, skipped), len(kept))


def _find_layers(model: nn.Module, method: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers to correct, and the reasons why other quantized layers are not."""
    layers: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, module in weighted_modules(model):
        if not isinstance(module, LAYERS):
            skipped[name] = f"{type(module).__name__} is no convolution or linear layer"
        elif module.bias is None:
            skipped[name] = "it has no bias; fuse BatchNorm first, or build it with one"
        elif method == "analytic" and isinstance(module, TRANSPOSED):
            skipped[name] = "the analytic method leaves transposed convolutions alone"
        else:
            layers[name] = module
    check_found("correct_bias_", layers, skipped, "a calibrated model whose layers have biases")
    return layers, skipped


def _means(
    model: nn.Module,
    batches: list[Any],
    forward: Forward | None,
    layers: Mapping[str, Any],
    of_inputs: bool,
) -> dict[str, Tensor]:
    """Return the float64 mean of each channel of the layers that run, in running order.

    The means are of inputs or outputs, over all calls of a layer.
    """
    totals: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}

    def note(name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        x, weight = args[0] if of_inputs else out, layers[name].weight
        axis = -1 if isinstance(layers[name], nn.Linear) else x.dim() - weight.dim() + 1
        rows = x.detach().movedim(axis, 0).flatten(1).double()
        totals[name] = totals[name] + rows.sum(1) if name in totals else rows.sum(1)
        numbers[name] = numbers.get(name, 0) + rows.shape[1]

    with watching((layer, partial(note, name)) for name, layer in layers.items()):
        for batch in batches:
            call_model(model, batch, forward=forward, device=device_of(model))
    for name, total in totals.items():
        check_finite(f"correct_bias_: {name}", numbers[name], total)
    return {name: total / numbers[name] for name, total in totals.items()}


def _product(layer: Any, weight: Tensor, mean_input: Tensor) -> Tensor:
    """Return the product of a weight and the mean of each input channel, (out,)."""
    per_channel = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    groups = getattr(layer, "groups", 1)
    rows = per_channel.view(groups, -1, per_channel.shape[1])
    return (rows @ mean_input.view(groups, -1, 1)).flatten()


def _root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
