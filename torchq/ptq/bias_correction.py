"""Bias correction: remove the mean error that quantization adds to the output of a layer.

Rounding the weights of an output channel, and rounding or clipping its input, shifts the mean of
the channel. The bias can take this shift back at no cost.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.2 and appendix D.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import QuantModule
from torchq.ptq.channels import LAYERS, TRANSPOSED, restored_on_error
from torchq.ptq.layers import check_calibrated, quantizers_off
from torchq.ptq.reports import report_text
from torchq.utils import check_batches, device_of, evaluating, progress_bar


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
            They are read several times, so an iterator is kept in memory as a list.
        method: ``"empirical"`` compares the mean outputs of the float and of the quantized model,
            one layer after the other, so that each layer also takes back what the layers before
            it add. It reads the batches once for each layer. ``"analytic"`` computes the shift
            ``(quantized weight - weight) * mean input``, which rounding the weights alone makes;
            it reads the batches once, and leaves ConvTranspose layers alone.
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
    stream = _Stream(model, batches, num_batches, forward, progress)
    with (
        torch.no_grad(),
        evaluating(model),
        restored_on_error(layer.bias for layer in layers.values()),
    ):
        with quantizers_off(model):
            float_means = stream.means(layers, of_inputs=method == "analytic")
        reached = {name: layers[name] for name in float_means}
        skipped |= dict.fromkeys(layers.keys() - reached.keys(), "no batch reached it")
        corrections, once = {}, stream.calls_once
        for name, layer in reached.items():
            if method == "empirical":
                found = stream.means({name: layer}, of_inputs=False, stop=name in once)[name]
                change = float_means[name] - found
                size = float_means[name]
            else:
                change = -_weight_error(layer, float_means[name])
                size = _mean_output(layer, float_means[name])
            layer.bias += change.to(layer.bias)
            corrections[name] = _root_mean_square(change) / max(_root_mean_square(size), 1e-30)
    ordered = {name: skipped[name] for name in dict(model.named_modules()) if name in skipped}
    return BiasReport(corrections, ordered, stream.count)


def _find_layers(model: nn.Module, method: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers to correct, and the reasons why other quantized layers are not."""
    layers: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, QuantModule) or not list(module.quantized_weights()):
            continue
        if not isinstance(module, LAYERS):
            skipped[name] = f"{type(module).__name__} is no convolution or linear layer"
        elif module.bias is None:
            skipped[name] = "it has no bias; fuse BatchNorm first, or build it with one"
        elif method == "analytic" and isinstance(module, TRANSPOSED):
            skipped[name] = "the analytic method leaves transposed convolutions alone"
        else:
            layers[name] = module
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise ConfigError(
            f"correct_bias_: got no quantized layer with a bias ({reasons or 'none quantized'}); "
            "expected a calibrated model"
        )
    return layers, skipped


class _Reached(Exception):
    """Ends a forward pass once the layer of interest has run for the only time."""


@dataclass
class _Stream:
    """The batches and how they are run."""

    model: nn.Module
    batches: Iterable[Any]
    num_batches: int | None
    forward: Forward | None
    progress: bool
    count: int = field(default=0, init=False)
    calls_once: frozenset[str] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        check_batches("correct_bias_", self.batches, self.num_batches)
        if isinstance(self.batches, Iterator):
            self.batches = list(islice(self.batches, self.num_batches))

    def means(
        self, layers: Mapping[str, nn.Module], *, of_inputs: bool, stop: bool = False
    ) -> dict[str, Tensor]:
        """Return the float64 mean of each channel of the layers that run, in running order.

        :attr:`calls_once` then names those that ran no more than once in any batch. The means are
        of inputs or outputs; with ``stop`` a pass ends after the first call of any of the layers.
        """
        sums: dict[str, _Mean] = {}
        device, self.count = device_of(self.model), 0
        with ExitStack() as stack:
            for name, layer in layers.items():
                hook = _mean_hook(sums, name, of_inputs, stop)
                stack.callback(layer.register_forward_hook(hook).remove)
            what = next(iter(layers)) if len(layers) == 1 else "float model"
            for batch in progress_bar(
                self.batches,
                description=f"correct_bias_: {what}",
                most=self.num_batches,
                enabled=self.progress,
            ):
                with suppress(_Reached):
                    call_model(self.model, batch, forward=self.forward, device=device)
                self.count += 1
                for mean in sums.values():
                    mean.end_batch()
        if not self.count:
            raise CalibrationError("correct_bias_: got no batch; expected at least one")
        self.calls_once = frozenset(name for name, mean in sums.items() if mean.most_calls <= 1)
        return {name: mean.value(name) for name, mean in sums.items()}


class _Mean:
    """The running mean of each channel.

    Attributes:
        most_calls: the largest number of tensors that were added for one batch.
    """

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.number = 0
        self.most_calls = self._calls = 0

    def end_batch(self) -> None:
        """Count from 0 again."""
        self.most_calls, self._calls = max(self.most_calls, self._calls), 0

    def add(self, x: Tensor, channel_axis: int) -> None:
        """Add all positions of ``x``."""
        self._calls += 1
        rows = x.detach().movedim(channel_axis, 0).flatten(1).double()
        total = rows.sum(1)
        self.total = total if self.total is None else self.total + total
        self.number += rows.shape[1]

    def value(self, name: str) -> Tensor:
        """Return the mean; NaN or infinity is an error."""
        assert self.total is not None
        mean = self.total / self.number
        if not bool(mean.isfinite().all()):
            what = "NaN or infinite values" if self.number else "batches without rows"
            raise CalibrationError(
                f"correct_bias_: {name}: got {what}; expected finite ones. Check the input and the "
                "layers before"
            )
        return mean


def _mean_hook(sums: dict[str, _Mean], name: str, of_inputs: bool, stop: bool) -> Any:
    """Return a forward hook that adds the input or output of a layer to its mean."""

    def hook(layer: Any, args: tuple[Any, ...], out: Tensor) -> None:
        x = args[0] if of_inputs else out
        axis = -1 if isinstance(layer, nn.Linear) else x.dim() - 1 - layer.weight.dim() + 2
        sums.setdefault(name, _Mean()).add(x, axis)
        if stop:
            raise _Reached

    return hook


def _weight_error(layer: Any, mean_input: Tensor) -> Tensor:
    """Return the mean shift of the outputs that rounding the weights makes."""
    ((quantizer, weight),) = layer.quantized_weights()
    return _apply(layer, (quantizer(weight) - weight).double(), mean_input)


def _mean_output(layer: Any, mean_input: Tensor) -> Tensor:
    """Return the mean output of the float layer, without padding."""
    return _apply(layer, layer.weight.double(), mean_input) + layer.bias.double()


def _apply(layer: Any, weight: Tensor, mean_input: Tensor) -> Tensor:
    """Return the product of a weight and the mean of each input channel, (out,)."""
    per_channel = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    groups = getattr(layer, "groups", 1)
    rows = per_channel.view(groups, -1, per_channel.shape[1])
    return (rows @ mean_input.view(groups, -1, 1)).flatten()


def _root_mean_square(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
