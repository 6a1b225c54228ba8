"""What passes unchanged through what: modules that do nothing, the rank of linear layers, shifts at the border of convolutions."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.fusion.modules import TRANSPOSED, is_norm, norm_affine
from torchq.graph import Call, Flow

__all__ = ["border", "does_nothing", "inferred_rank", "moves_features", "paddable"]


def does_nothing(call: Call) -> bool:
    """Whether ``call`` gives back what it gets: an Identity, or dropout in eval mode."""
    dropout = (
        isinstance(call.module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d))
        and not call.module.training
    )
    return type(call.module) is nn.Identity or dropout


def moves_features(call: Call) -> tuple[int, ...]:
    """The rank of the tensor whose last axis, the features of a linear layer, ``call`` brings to axis 1; empty if it does no such thing."""
    if call.name == "flatten":
        return (3,) if tuple(a for a in call.arguments if isinstance(a, int)) == (0, 1) else ()
    flat = (
        call.arguments[0]
        if len(call.arguments) == 1 and isinstance(call.arguments[0], (tuple, list))
        else call.arguments
    )
    return (
        (len(flat),)
        if call.name == "permute" and tuple(flat) in ((0, 2, 1), (0, 3, 1, 2), (0, 4, 1, 2, 3))
        else ()
    )


def inferred_rank(flow: Flow, call: Call) -> int | None:
    """2 where the call's input was flattened from axis 1 on; layers, norms and elementwise modules in between keep the rank."""
    while len(call.inputs) == 1:
        call = flow.calls[call.inputs[0]]
        if type(call.module) is nn.Flatten and (call.module.start_dim, call.module.end_dim) == (
            1,
            -1,
        ):
            return 2
        if call.name == "flatten" and call.module is None and call.arguments in ((1,), (1, -1)):
            return 2
        if not (
            isinstance(call.module, (nn.Linear, nn.ReLU, nn.Hardswish, nn.GELU))
            or is_norm(call.module)
            or does_nothing(call)
        ):
            return None
    return None


def border(layer: Any) -> str | None:
    """Why a shift before ``layer`` does not pass through it at the border, or None."""
    if isinstance(layer, nn.Linear):
        return None
    if isinstance(layer, TRANSPOSED):
        plain = (
            set(layer.kernel_size) == {1}
            and set(layer.stride) == {1}
            and not any(layer.padding)
            and not any(layer.output_padding)
        )
        return (
            None
            if plain
            else "is transposed: how many taps overlap varies with the position, so a shift before it does not fold"
        )
    if (
        layer.padding_mode != "zeros"
        or layer.padding == "valid"
        or (layer.padding != "same" and not any(layer.padding))
    ):
        return None
    if set(layer.kernel_size) == {1} and layer.padding == "same":
        return None
    return "pads with zeros, which a shift before it would change at the border; constant_pad=True pads explicitly instead"


def paddable(layer: Any, norm: Any) -> bool:
    """Whether the zero point of ``norm`` exists in every channel, to pad ``layer`` with explicitly."""
    return isinstance(layer.padding, tuple) and bool((norm_affine(norm)[0] != 0).all())
