"""What passes a value on: calls that change nothing, that move features, that keep dimensions."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.fusion.modules import TRANSPOSED, is_norm, is_plain, norm_affine
from torchq.fusion.quantized import RescalesOutput
from torchq.graph import Call, Flow

__all__ = ["border_obstacle", "does_nothing", "inferred_ndim", "moves_features", "paddable"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_KEEP_NDIM = (nn.Linear, nn.ReLU, nn.Hardswish, nn.GELU)


def does_nothing(call: Call) -> bool:
    """Return True if ``call`` returns its input: an Identity, or dropout in eval mode."""
    module = call.module
    if is_plain(module, nn.Identity):
        return True
    return module is not None and is_plain(module, *_DROPOUTS) and not module.training


def moves_features(call: Call) -> tuple[int, ...]:
    """Return the ndim of the tensor whose last axis ``call`` brings to axis 1.

    The last axis holds the features of a linear layer. The result has one number, or none if
    ``call`` does no such thing.
    """
    arguments = call.arguments
    if call.name == "flatten":
        axes = tuple(value for value in arguments if isinstance(value, int))
        return (3,) if axes == (0, 1) else ()
    if call.name != "permute":
        return ()
    if len(arguments) == 1 and isinstance(arguments[0], (tuple, list)):
        arguments = tuple(arguments[0])
    moved = ((0, 2, 1), (0, 3, 1, 2), (0, 4, 1, 2, 3))
    return (len(arguments),) if tuple(arguments) in moved else ()


def inferred_ndim(flow: Flow, call: Call) -> int | None:
    """Return 2 if the input of ``call`` was flattened from axis 1 on, else None for unknown.

    Linear layers, BatchNorms and elementwise modules in between keep the number of dimensions.
    """
    while len(call.inputs) == 1:
        call = flow.calls[call.inputs[0]]
        if _flattens(call):
            return 2
        if not (_keeps_ndim(call.module) or does_nothing(call)):
            return None
    return None


def _keeps_ndim(module: nn.Module | None) -> bool:
    if isinstance(module, nn.Linear) and isinstance(module, RescalesOutput):
        return True  # a quantized linear layer has a forward of its own
    return is_plain(module, *_KEEP_NDIM) or is_norm(module)


def _flattens(call: Call) -> bool:
    """Return True if ``call`` flattens everything from axis 1 on."""
    module: Any = call.module
    if is_plain(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    return module is None and call.name == "flatten" and call.arguments in ((1,), (1, -1))


def border_obstacle(layer: Any) -> str | None:
    """Return why a shift before ``layer`` does not pass through it at the border, or None."""
    if isinstance(layer, nn.Linear):
        return None
    single_tap = set(layer.kernel_size) == {1}
    if isinstance(layer, TRANSPOSED):
        padded = any(layer.padding) or any(layer.output_padding)
        if single_tap and set(layer.stride) == {1} and not padded:
            return None
        return (
            "is transposed: how many taps overlap varies with the position, so a shift before it"
            " does not fold"
        )
    if layer.padding_mode != "zeros" or layer.padding == "valid":
        return None
    if layer.padding == "same" and single_tap:
        return None
    if layer.padding != "same" and not any(layer.padding):
        return None
    return (
        "pads with zeros, which a shift before it would change at the border;"
        " constant_pad=True pads explicitly instead"
    )


def paddable(layer: Any, norm: Any) -> bool:
    """Return True if every channel of ``norm`` has a value that it maps to zero, to pad with."""
    return isinstance(layer.padding, tuple) and bool((norm_affine(norm)[0] != 0).all())
