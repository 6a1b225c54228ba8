"""The layers that algorithms treat: what they need before, their grids, and their channels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.formats import Format
from torchq.functional import compute_dtype, scale_from_amax
from torchq.functional.scale import divisor
from torchq.graph import Flow, Forward, call_model, is_torch_leaf, tensors_in
from torchq.graph.operators import LAYERS
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.correction import forget_corrections
from torchq.utils import device_of, state_kept, table, undone_on_error
from torchq.workflow import quantizers, weight_quantizers
from torchq.workflow.layer_matrices import weight_channels, weight_matrix

T = TypeVar("T")

SHARED = "it shares its weight with another module"

# What factors may change of 16-bit weights, in units in the last place.
_ULPS = 8


def own_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yield the parameters and buffers of modules, without those of their parts."""
    for module in modules:
        yield from (*module.parameters(recurse=False), *module.buffers(recurse=False))


def first_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the input of a call of a layer."""
    tensor: Tensor = args[0] if args else kwargs["input"]
    return tensor


def is_leaf(module: nn.Module) -> bool:
    """Return True for what counts as one call: a layer, quantized or not, but no block of them.

    Blocks are quantized modules too where their forward adds or multiplies. Attention of torch.nn
    stays one call.
    """
    if not isinstance(module, QuantModule):
        return is_torch_leaf(module)
    is_of_torch = module.float_class.__module__.startswith("torch.nn.")
    return is_of_torch or not module.is_container


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


def check_finite(where: str, count: int, *tensors: Tensor | None) -> None:
    """Raise an error for statistics of no rows, and for NaN or infinity in them."""
    if not count:
        raise CalibrationError(
            f"{where}: got batches without rows; expected at least one row"
        )
    if not all(
        bool(tensor.isfinite().all()) for tensor in tensors if tensor is not None
    ):
        raise CalibrationError(
            f"{where}: got NaN or infinite inputs or outputs; expected finite ones. Check the "
            "batches and the layers before"
        )


def in_order(model: nn.Module, skipped: Mapping[str, str]) -> dict[str, str]:
    """Return the reasons in the order of the modules of ``model``."""
    return {name: skipped[name] for name, _ in model.named_modules() if name in skipped}


def is_shared(model: nn.Module, tensor: Tensor) -> bool:
    """Return True if several modules have a parameter."""
    return (
        sum(any(p is tensor for p in m.parameters(False)) for m in model.modules()) > 1
    )


def why_fixed(flow: Flow, layer: Any) -> str | None:
    """Return why factors cannot change the weight of a layer, or None."""
    calls = flow.calls_of(layer)
    if len(calls) > 1:
        return "it runs several times"
    if id(layer) in flow.read or any(call.functional for call in calls):
        return "its weight is read by a function"
    parametrized = parametrize.is_parametrized(layer)
    return "its weight is computed by a parametrization" if parametrized else None


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


def check_not_calibrated(where: str, model: nn.Module) -> None:
    """Raise an error for a calibrated model.

    Ranges that are no matter of calibration do not count where no layer reads them, as 0 to 1
    behind a sigmoid: factors of channels do not pass there.
    """
    of_layers = {
        id(part)
        for module in model.modules()
        if isinstance(module, LAYERS)
        for part in module.children()
    }
    calibrated = [
        name
        for name, quantizer in quantizers(model).items()
        if quantizer.calibrated
        and (quantizer.descriptor.amax is None or id(quantizer) in of_layers)
    ]
    if calibrated:
        raise ConfigError(
            f"{where}: got a calibrated model ({calibrated[0]} has a range), whose ranges would be "
            "wrong afterwards; expected a call before torchq.calibrate"
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


def scale_(layer: Any, factor: Tensor, *, inputs: bool = False) -> None:
    """Multiply the output channels of a layer and its bias, or the input channels, in place."""
    factor = factor.to(layer.weight.dtype)
    channels = weight_channels(layer, inputs=inputs)
    channels.mul_(factor.view(*channels.shape[:2], *[1] * (channels.dim() - 2)))
    if layer.bias is not None and not inputs:
        layer.bias.mul_(factor)


def largest_change(least: float, layers: Sequence[Any]) -> float:
    """Return the relative change of a float output that rounding of the new weights explains.

    ``least`` is that for float32.
    """
    return max(
        [least, *(_ULPS * torch.finfo(layer.weight.dtype).eps for layer in layers[:1])]
    )


def change_checked(
    change: Callable[[], T],
    layers: Sequence[Any],
    outputs: Callable[[], list[Tensor]],
    most: float,
    where: str,
    remedy: str,
) -> tuple[T, float]:
    """Change ``layers`` in place; return what ``change`` returns, and by how much outputs changed.

    A relative change of the float ``outputs`` by more than ``most`` undoes everything and is an
    error. In its ``remedy`` {} stands for twice the change.
    """
    before = outputs()
    with undone_on_error(*layers, written=own_tensors(layers)):
        result = change()
        for layer in layers:
            forget_corrections(layer)  # They were fitted to the weights before.
        pairs = zip(outputs(), before, strict=True)
        errors = [(f - e).norm() / e.norm().clamp(min=1e-30) for f, e in pairs]
        error = torch.stack(errors).max().item() if errors else 0.0
        if not error <= most:
            raise QuantizationError(
                f"{where}: the float output changed by {error:.1e}, relative; expected at most "
                f"{most:.1e}. The model is as before. {remedy.format(2 * error)}"
            )
    return result, error


def float_outputs(
    model: nn.Module, batch: object, forward: Forward | None = None
) -> list[Tensor]:
    """Return the floating-point outputs of a model, in float64; it keeps its state."""
    with state_kept(model):
        out = call_model(model, batch, forward=forward, device=device_of(model))
    return [tensor.double() for tensor in tensors_in(out) if tensor.is_floating_point()]


def report_text(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    skipped: Mapping[str, str],
    last: str,
) -> str:
    """Return a table of what was treated, then of what was left alone with reasons, and a line."""
    empty = [""] * (len(header) - 2)
    skipped_rows = [
        (name, *empty, f"SKIPPED: {reason}") for name, reason in skipped.items()
    ]
    return table([tuple(header), *map(tuple, rows), *skipped_rows], last)
