"""What functions share that change the weights of layers and keep the float outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.graph import Flow, Forward, call_model, is_torch_leaf, tensors_in
from torchq.graph.operators import LAYERS
from torchq.nn import QuantModule
from torchq.nn.correction import forget_corrections
from torchq.utils import device_of, state_kept, table, undone_on_error
from torchq.workflow.layer_matrices import weight_channels
from torchq.workflow.modes import quantizers

T = TypeVar("T")

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
