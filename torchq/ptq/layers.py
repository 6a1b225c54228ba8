"""The layers that algorithms treat: what they need before, their grids, and their channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchq.errors import ConfigError, QuantizationError
from torchq.formats import Format
from torchq.functional import compute_dtype, scale_from_amax
from torchq.functional.scale import divisor
from torchq.graph.operators import LAYERS
from torchq.nn import QuantModule, TensorQuantizer
from torchq.workflow import quantizers, weight_quantizers
from torchq.workflow.layer_changes import is_shared
from torchq.workflow.layer_matrices import weight_matrix

SHARED = "it shares its weight with another module"


def weighted_modules(model: nn.Module) -> Iterator[tuple[str, QuantModule]]:
    """Yield the quantized modules with quantized weights, and their paths."""
    for name, module in model.named_modules():
        if isinstance(module, QuantModule) and list(module.quantized_weights()):
            yield name, module


def find_layers(
    where: str, model: nn.Module, *, integer: bool = False
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the quantized Linear and Conv layers, and why other quantized layers are left alone.

    With ``integer`` the weights must have integer codes. No layer at all, or a fixed range of an
    activation that is not known, is an error that starts with ``where``.
    """
    obstacles = {
        n: (m, _obstacle(model, m, integer)) for n, m in weighted_modules(model)
    }
    layers = {
        name: module for name, (module, reason) in obstacles.items() if reason is None
    }
    skipped = {
        name: reason for name, (_, reason) in obstacles.items() if reason is not None
    }
    check_found(where, layers, skipped, "a model with quantized Linear or Conv layers")
    check_calibrated(where, model)
    return layers, skipped


def check_found(
    where: str, found: object, skipped: Mapping[str, str], expected: str
) -> None:
    """Raise an error with the reasons for other layers if no layer was found."""
    if not found:
        reasons = "; ".join(
            f"{name}: {reason}" for name, reason in list(skipped.items())[:3]
        )
        raise ConfigError(
            f"{where}: got no layer to treat ({reasons or 'none is quantized'}); expected "
            f"{expected}. Run torchq.quantize_ first, or leave this algorithm out"
        )


def _obstacle(model: nn.Module, module: QuantModule, integer: bool) -> str | None:
    """Return why the weight of a quantized module cannot be rounded otherwise, or None."""
    if not isinstance(module, LAYERS):
        return f"{type(module).__name__} is no convolution or linear layer"
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    quantizer = weight_quantizer(module)
    descriptor = quantizer.descriptor
    if not quantizer.quantizing:
        return "its weight quantizer is off"
    if descriptor.dynamic:
        return "its weight range is dynamic: it would change with the rounded weights"
    if not descriptor.symmetric:
        return "its weight range is asymmetric"
    if not descriptor.fake_quant:
        return "its weight quantizer returns codes"
    if quantizer.pre_quant_scale is not None:
        return (
            "the quantizer of its weight multiplies it by factors, of smooth_ or of calibrate, "
            "which chooses none with correct=False"
        )
    if is_shared(model, module.weight):
        return SHARED
    is_float = integer and not descriptor.format.is_integer
    return "its weight has no integer codes" if is_float else None


def weight_quantizer(layer: Any) -> TensorQuantizer:
    """Return the quantizer of the weight of a Linear or Conv layer."""
    ((quantizer, _),) = layer.quantized_weights()
    return quantizer


def check_calibrated(where: str, model: nn.Module) -> None:
    """Raise an error unless every fixed range of an activation is known."""
    weights = weight_quantizers(model)
    for name, quantizer in quantizers(model).items():
        is_fixed = quantizer.quantizing and not quantizer.descriptor.dynamic
        if is_fixed and not quantizer.calibrated and id(quantizer) not in weights:
            raise ConfigError(
                f"{where}: {name} has no range yet; expected a calibrated model. Run "
                "torchq.calibrate(model, batches) first"
            )


class Grid:
    """The scale of every entry of a weight matrix, and rounding onto the grid.

    Codes are multiplied by ``scale`` and values divided by ``divisor``, which is infinite where a
    range is dead; both are (rows, columns), perhaps with a first dimension of groups.
    """

    def __init__(self, scale: Tensor, divisor: Tensor, format: Format) -> None:
        self.scale, self.divisor, self.format = scale, divisor, format

    def nearest(self, values: Tensor, columns: slice | int = slice(None)) -> Tensor:
        """Return ``values`` of some columns rounded to the nearest grid value, in their dtype."""
        scale = self.scale[..., columns]
        divisor = self.divisor[..., columns]
        codes = self.format.snap_(values.to(scale.dtype) / divisor)
        return (codes * scale).to(values.dtype)

    def groups(self) -> list[Grid]:
        """Return the grid of each group, for a grid with a first dimension of groups."""
        pairs = zip(self.scale, self.divisor, strict=True)
        return [Grid(scale, divisor, self.format) for scale, divisor in pairs]


def grid_of(layer: Any, amax: Tensor | None = None) -> Grid:
    """Return the grid of the weight of ``layer``, as (groups, outputs, inputs) matrices.

    ``amax`` is a range in place of that of its weight quantizer, of the same shape.
    """
    quantizer = weight_quantizer(layer)
    weight = layer.weight.detach()
    d = quantizer.descriptor
    if amax is None:
        amax = quantizer.range_for(weight).high
        scale = quantizer.qparams(weight).scale
    else:
        amax = amax.to(compute_dtype(weight.dtype))
        scale = scale_from_amax(amax, d.format, d.block_scale_format)
    aligned, scale = (
        d.granularity.align(t.to(scale.dtype), weight.shape) for t in (amax, scale)
    )
    split = d.granularity.split(weight)
    whole = [
        weight_matrix(layer, d.granularity.join(t.expand_as(split), weight.shape))
        for t in (scale, divisor(aligned, scale))
    ]
    return Grid(whole[0], whole[1], d.format)


def check_on_grid(where: str, name: str, layer: object, weight: Tensor) -> None:
    """Raise an error unless the quantizer of ``layer`` returns ``weight`` bit for bit."""
    if not torch.equal(weight_quantizer(layer)(weight), weight):
        raise QuantizationError(
            f"{where}: {name}: got rounded weights that {weight_quantizer(layer).descriptor} "
            f"changes in {weight.dtype}; expected values of its grid. Use a wider dtype"
        )
