"""What makes the channels of a tensor: a norm or a layer, whose parameters can take factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import Call, Flow, call_model, tensors_in
from torchq.ptq.channels import (
    LAYERS,
    input_ranges,
    output_ranges,
    scale_inputs_,
    scale_outputs_,
)
from torchq.ptq.homogeneous import keeps_factors

__all__ = ["is_norm", "layer_before", "takes_factors"]

_PRODUCTS = frozenset(["mul", "mul_", "multiply"])
# Functions that give elements other places.
_LAYOUT = frozenset(
    [
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *("swapaxes", "squeeze", "unsqueeze", "movedim"),
    ]
)
_ATTENTION = "scaled_dot_product_attention"
# A factor that does not reach every output unchanged changes them by far more.
_SAME = 1e-4


def is_norm(module: nn.Module) -> bool:
    """Return True for LayerNorm and for RMSNorm, torch's or another library's."""
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    weight = getattr(module, "weight", None)
    return named and weight is not None and weight.dim() == 1


def takes_factors(model: nn.Module, flow: Flow, call: Call) -> str | None:
    """Return why the weight of a called layer cannot be multiplied by factors, or None."""
    layer: Any = call.module
    if len(flow.calls_of(layer)) > 1:
        return "it runs several times"
    if call.functional or id(layer) in flow.read:
        return "its weight is read by a function"
    sharing = [m for m in model.modules() if any(p is layer.weight for p in m.parameters(False))]
    return "it shares its weight with another module" if len(sharing) > 1 else None


def layer_before(
    model: nn.Module, flow: Flow, source: Call, readers: list[Call], example: Any
) -> tuple[str, Any] | None:
    """Return the layer whose output channels are the input channels of ``readers``, or None.

    Between them may lie positively homogeneous functions, a product with another tensor, and
    attention, in which the layer makes the values. What the flow cannot prove is tried: random
    factors must leave the output of the model as it is.

    Args:
        model: in float.
        flow: of one run.
        source: the call whose result the readers read; nothing else reads it.
        readers: layers of one input.
        example: the arguments of one call.
    """
    found = _walk(flow, source)
    if found is None:
        return None
    call, proven = found
    layer, second = call.module, readers[0].module
    if takes_factors(model, flow, call) is not None or layer is None:
        return None
    if len(output_ranges(layer)) != len(input_ranges(second)):
        return None
    layers = [reader.module for reader in readers]
    if not proven and not _keeps_output(model, layer, layers, example):
        return None
    return call.name, layer


def _walk(flow: Flow, current: Call, proven: bool = True) -> tuple[Call, bool] | None:
    """Return the layer before a call, and True if factors of its channels surely pass."""
    if isinstance(current.module, LAYERS):
        return current, proven
    is_product = current.module is None and current.name in _PRODUCTS
    if current.module is None and current.name == _ATTENTION and len(current.inputs) > 2:
        sources = current.inputs[2:3]
    elif (is_product and len(current.inputs) == 2) or (
        len(current.inputs) == 1 and (keeps_factors(current, True) or _moves_elements(current))
    ):
        sources = current.inputs
    else:
        return None
    proven = proven and keeps_factors(current, False)
    for index in sources:
        before = flow.calls[index]
        if len(flow.consumers(before)) == 1 and index not in flow.outputs:
            found = _walk(flow, before, proven)
            if found is not None:
                return found
    return None


def _moves_elements(call: Call) -> bool:
    """Return True for a call that gives elements other places."""
    return isinstance(call.module, nn.Flatten) or (call.module is None and call.name in _LAYOUT)


def _keeps_output(model: nn.Module, first: Any, seconds: list[Any], example: Any) -> bool:
    """Return True if factors between layers leave the output of the model as it is."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.rand(len(output_ranges(first)), generator=generator, device="cpu") + 0.5
    factor = factor.to(first.weight.device)
    expected = _outputs(model, example)
    parameters = [first.weight, first.bias, *(second.weight for second in seconds)]
    before = [(p, p.detach().clone()) for p in parameters if p is not None]
    try:
        scale_outputs_(first, factor)
        for second in seconds:
            scale_inputs_(second, 1 / factor)
        found = _outputs(model, example)
    finally:
        for parameter, value in before:
            parameter.copy_(value)
    pairs = zip(found, expected, strict=True)
    return all((f - e).norm() <= _SAME * e.norm().clamp(min=1e-30) for f, e in pairs)


def _outputs(model: nn.Module, example: Any) -> list[Tensor]:
    return [t.double() for t in tensors_in(call_model(model, example)) if t.is_floating_point()]
