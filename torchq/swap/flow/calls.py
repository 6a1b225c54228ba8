"""What the calls of a recorded run do, as the rules about quantizers ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

from torchq.graph import REARRANGING, Call, is_torch_leaf
from torchq.nn import QuantModule, TensorQuantizer

_RELU = frozenset(["relu", "relu_"])
_CLIPS = frozenset(["relu6", "clamp", "clamp_", "clip", "clip_", "hardtanh", "hardtanh_"])
_MOVING_MODULES = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)
_PADDING_MODULES = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def is_leaf(module: nn.Module) -> bool:
    """Return True for modules that count as one call: quantized ones, and those of torch."""
    if isinstance(module, QuantModule):
        return not module.is_container and bool(module.slots())
    return isinstance(module, TensorQuantizer) or is_torch_leaf(module)


def is_depthwise(module: nn.Module | None) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Return True for a convolution of each channel by itself."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    return 1 < module.groups == module.in_channels == module.out_channels


def is_float_layer(module: nn.Module | None) -> bool:
    """Return True for a layer with weights that is not quantized."""
    return isinstance(module, _LAYERS) and not isinstance(module, QuantModule)


def is_relu(call: Call) -> bool:
    """Return True for a ReLU, as a module or as a function."""
    return isinstance(call.module, nn.ReLU) or (call.module is None and call.name in _RELU)


def clips(call: Call) -> bool:
    """Return True for ReLU and its like, which a quantizer behind them includes."""
    if is_relu(call) or isinstance(call.module, nn.Hardtanh):
        return True
    return call.module is None and call.name in _CLIPS


def moves_elements(call: Call) -> bool:
    """Return True for a call that rearranges the elements of a tensor, or returns it."""
    if call.module is None:
        return call.name in REARRANGING
    return isinstance(call.module, _MOVING_MODULES) and not isinstance(call.module, QuantModule)


def pads_with_zeros(call: Call) -> bool:
    """Return True for zeros around a tensor, which files let convolutions behind them add."""
    module = call.module
    if module is not None:
        return isinstance(module, _PADDING_MODULES) and module.value == 0
    given = {**dict(zip(("pad", "mode", "value"), call.arguments, strict=False)), **call.options}
    return call.name == "pad" and given.get("mode") in (None, "constant") and not given.get("value")


def quantizes(call: Call) -> bool:
    """Return True for a quantizer, and for a layer that quantizes what it reads."""
    module = call.module
    if isinstance(module, TensorQuantizer):
        return module.quantizing
    return isinstance(module, QuantModule) and all(_reads_quantized(module))


def _reads_quantized(module: QuantModule) -> Iterator[bool]:
    for slot in module.input_slots:
        quantizer = getattr(module, f"{slot}_quantizer")
        yield isinstance(quantizer, TensorQuantizer) and quantizer.quantizing
