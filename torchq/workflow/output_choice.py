"""Choices by the error at the outputs of layers: how inputs and weights get their ranges."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.formats import PerTensor
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import device_of
from torchq.workflow.layer_matrices import input_matrix, weight_matrix
from torchq.workflow.output_search import search_weight_amax

__all__ = [
    "AUTO",
    "BY_OUTPUT",
    "OutputSamples",
    "choose_methods",
    "set_range_by_output",
    "starting_method",
]

#: The name by which a caller leaves the calibration method of inputs to :func:`choose_methods`.
AUTO = "auto"
#: The calibration method of weights that looks at the output of the layer.
BY_OUTPUT = "activation"
# What is tried; of equal errors the first wins.
_METHODS = ("max", "percentile", "mse", "lp", "entropy")
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Calls whose inputs are kept, and what is kept of each call.
_CALLS, _COLUMNS, _IMAGES, _ELEMENTS = 8, 64, 2, 4096


class OutputSamples:
    """Some of the inputs of layers and quantizers in a run of a model; a context manager.

    Args:
        model: a quantized model; its Linear and Conv layers are watched.
        chosen: path -> quantizer; those that belong to no such layer are watched too.

    Attributes:
        layers: id of a layer -> samples of its input, (groups, inputs, samples).
        others: id of a quantizer -> elements of what it sees.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, TensorQuantizer]) -> None:
        self.layers: dict[int, Tensor] = {}
        self.others: dict[int, Tensor] = {}
        self._stack = ExitStack()
        self._calls: dict[int, int] = {}
        self._watched = [
            m for m in model.modules() if isinstance(m, _LAYERS) and isinstance(m, QuantModule)
        ]
        self._owners: dict[int, list[Any]] = {}
        for layer in self._watched:
            self._owners.setdefault(id(layer.input_quantizer), []).append(layer)
        self._rest = [q for q in chosen.values() if id(q) not in self._owners]

    def watches(self, layer: nn.Module) -> bool:
        """Return True for a Linear or Conv layer."""
        return any(layer is m for m in self._watched)

    def owners(self, quantizer: TensorQuantizer) -> list[Any]:
        """Return the layers that were reached and whose input a quantizer quantizes."""
        found = self._owners.get(id(quantizer), [])
        return [layer for layer in found if id(layer) in self.layers]

    def __enter__(self) -> OutputSamples:
        for layer in self._watched:
            hook = layer.register_forward_pre_hook(self._keep_matrix, with_kwargs=True)
            self._stack.callback(hook.remove)
        for quantizer in self._rest:
            self._stack.callback(quantizer.register_forward_pre_hook(self._keep_elements).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _is_new(self, module: nn.Module) -> bool:
        self._calls[id(module)] = self._calls.get(id(module), 0) + 1
        return self._calls[id(module)] <= _CALLS

    def _keep_matrix(self, layer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_new(layer):
            return
        x = (args[0] if args else kwargs["input"]).detach()
        if isinstance(layer, nn.Linear):
            x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
            x = _spread_out(x, 0, _COLUMNS)
        elif x.dim() == layer.weight.dim():
            x = x[:_IMAGES]
        scale = getattr(layer.input_quantizer, "pre_quant_scale", None)
        found = input_matrix(layer, x if scale is None else x * scale.to(x.dtype)).float()
        found = _spread_out(found, 2, _COLUMNS).clone()
        old = self.layers.get(id(layer))
        self.layers[id(layer)] = found if old is None else torch.cat([old, found], dim=2)

    def _keep_elements(self, quantizer: Any, args: Any) -> None:
        if self._is_new(quantizer):
            found = _spread_out(args[0].detach().flatten().float(), 0, _ELEMENTS).clone()
            old = self.others.get(id(quantizer))
            self.others[id(quantizer)] = found if old is None else torch.cat([old, found])


def _spread_out(x: Tensor, dim: int, count: int) -> Tensor:
    """Return at most ``count`` slices of ``x``, evenly spread."""
    size = x.shape[dim]
    if size <= count:
        return x
    return x.index_select(dim, torch.arange(count, device=x.device) * size // count)


def starting_method(quantizer: TensorQuantizer, method: str | None) -> str | None:
    """Return what a quantizer observes with if ``method`` is asked for.

    With :data:`AUTO` it is a histogram, from which every method can be computed. Quantizers with
    several ranges keep the method of their descriptor.
    """
    if method != AUTO:
        return method
    return "histogram" if _has_choice(quantizer) else None


def _has_choice(quantizer: TensorQuantizer) -> bool:
    return isinstance(quantizer.descriptor.granularity, PerTensor)


def choose_methods(
    model: nn.Module,
    activations: Mapping[str, TensorQuantizer],
    samples: OutputSamples,
    group: dist.ProcessGroup | None,
) -> dict[str, str]:
    """Return the calibration method of least error for each quantizer with one range.

    It is the error of the layer's output, and for quantizers of no layer that of the tensor.

    Args:
        model: whose device the ranks of a group talk on.
        activations: path -> quantizer that has observed with a histogram.
        samples: of the same run.
        group: processes whose errors are summed, so that all choose the same.
    """
    tried = {name: q for name, q in activations.items() if _has_choice(q)}
    if not tried:
        return {}
    rows = [_errors(quantizer, samples) for quantizer in tried.values()]
    table = torch.tensor(rows, dtype=torch.float64, device="cpu")
    if group is not None:
        table = table.to(device_of(model))
        dist.all_reduce(table, group=group)
    return {name: _METHODS[i] for name, i in zip(tried, table.argmin(1).tolist(), strict=True)}


def _errors(quantizer: TensorQuantizer, samples: OutputSamples) -> list[float]:
    """Return the error with each method; the quantizer goes on observing."""
    calibrator, errors = quantizer.calibrator, []
    if calibrator is None or not calibrator.seen:
        return [0.0] * len(_METHODS)
    for method in _METHODS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # The final choice warns.
                quantizer.finish_calibration(method=method)
            errors.append(_error(quantizer, samples))
        except CalibrationError:  # NaN, which the caller reports
            errors.append(0.0)
        quantizer.calibrator, quantizer.observing = calibrator, True
    return errors


def _error(quantizer: TensorQuantizer, samples: OutputSamples) -> float:
    """Return the squared error that a quantizer with a range makes."""
    total = 0.0
    for layer in samples.owners(quantizer):
        x = samples.layers[id(layer)]
        change = quantizer.apply_own(x) - x
        total += float((weight_matrix(layer, layer.weight.float()) @ change).square().sum())
    other = samples.others.get(id(quantizer))
    if other is not None:
        total += float((quantizer.apply_own(other) - other).square().sum())
    return total


def set_range_by_output(
    layer: Any,
    quantizer: TensorQuantizer,
    samples: OutputSamples | None,
    group: dist.ProcessGroup | None,
) -> bool:
    """Set the range of a weight by the error of the layer's output; return False if it cannot be.

    Args:
        layer: whose weight is quantized.
        quantizer: of the weight.
        samples: of the inputs of layers.
        group: processes whose errors are summed.
    """
    if samples is None or not samples.watches(layer) or not quantizer.descriptor.symmetric:
        return False
    x = samples.layers.get(id(layer))
    if x is None:
        if group is None:
            return False
        matrix = weight_matrix(layer, layer.weight)
        x = matrix.new_zeros(matrix.shape[0], matrix.shape[2], 0)

    def add(error: Tensor) -> Tensor:
        if group is not None:
            dist.all_reduce(error, group=group)
        return error

    amax = search_weight_amax(layer, x, add=add)
    quantizer.set_amax(amax)
    return True
