"""The integer operators in torch's registry, for compiled and exported programs, and copies.

They take plain tensors and numbers; here alone the arguments of kernels are taken apart and put
together. They run oneDNN on a CPU that has it, plain torch otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering import definition, onednn
from torchq.lowering.definition import ConvParams, Epilogue, Int8Weights

# A fragment: other parts of torchq define operators in the same namespace.
_LIBRARY = torch.library.Library("torchq", "FRAGMENT")

_WEIGHTS = "Tensor weight, Tensor weight_scale, Tensor? bias, float x_scale, int x_zero_point"
_PARAMS = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, int groups"
_EPILOGUE = (
    "float out_scale, int out_zero_point, ScalarType out_dtype, str activation, float[] arguments"
)
_RESIDUAL = "Tensor? residual=None, float residual_scale=1.0, int residual_zero_point=0"
_LIBRARY.define(f"int8_conv(Tensor x, {_WEIGHTS}, {_PARAMS}, {_EPILOGUE}, {_RESIDUAL}) -> Tensor")
_LIBRARY.define(f"int8_linear(Tensor x, {_WEIGHTS}, {_EPILOGUE}) -> Tensor")


def kernel(device: torch.device) -> tuple[str, str]:
    """Return which kernel an operator runs, and why nothing faster where that is the reference."""
    if device.type == "cpu":
        if onednn.available():
            return "onednn", ""
        return "reference", "this torch has no oneDNN operators"
    return "reference", f"integer kernels run on CPUs, not on {device.type}"


def int8_conv(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the convolution of uint8 codes by ``torch.ops.torchq.int8_conv``."""
    *output, scale, zero_point = epilogue
    return torch.ops.torchq.int8_conv(x, *weights, *params, *output, residual, scale, zero_point)


def int8_linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``activation(x @ weight.T + bias)`` by ``torch.ops.torchq.int8_linear``."""
    *output, _, _ = epilogue
    return torch.ops.torchq.int8_linear(x, *weights, *output)


def _operator(name: str, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``run``, which takes parameter objects, as a function of the operator's arguments.

    torch leaves out trailing arguments that have their default value.
    """

    def operator(x: Tensor, *flat: Any) -> Tensor:
        weights, rest, params = Int8Weights(*flat[:5]), flat[5:], list[ConvParams]()
        if name == "conv":
            stride, padding, dilation = map(tuple, rest[:3])
            params, rest = [ConvParams(stride, padding, dilation, rest[3])], rest[4:]
        scale, zero_point, dtype, activation, arguments = rest[:5]
        output = (scale, zero_point, dtype, activation, tuple(arguments))
        epilogue = Epilogue(*output, *rest[6:])
        return run(x, weights, *params, epilogue, *rest[5:6])

    return operator


def _conv_cpu(x: Tensor, *args: Any) -> Tensor:
    return (onednn if onednn.available() and x.numel() else definition).conv(x, *args)


def _linear_cpu(x: Tensor, *args: Any) -> Tensor:
    return (onednn if onednn.available() and x.numel() else definition).linear(x, *args)


def _conv_fake(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    shape = torch.Size(params.output_shape(x.shape, weights.codes.shape))
    if residual is not None:
        shape = torch.broadcast_shapes(shape, residual.shape)
    out = x.new_empty(shape, dtype=epilogue.dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if x.dim() in formats and x.device.type == "cpu" and onednn.available():
        return out.to(memory_format=formats[x.dim()])
    return out


def _linear_fake(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    return x.new_empty((*x.shape[:-1], weights.codes.shape[0]), dtype=epilogue.dtype)


def _register(name: str, *runs: Callable[..., Tensor]) -> None:
    """Enter what an operator runs anywhere, on CPUs, and to know the shape of its result."""
    anywhere, cpu, fake = (_operator(name, run) for run in runs)
    _LIBRARY.impl(f"int8_{name}", anywhere, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"int8_{name}", cpu, "CPU")
    torch.library.register_fake(f"torchq::int8_{name}", fake, lib=_LIBRARY)


_register("conv", definition.conv, _conv_cpu, _conv_fake)
_register("linear", definition.linear, _linear_cpu, _linear_fake)


#: The channels that torch's kernel computes at once.
_AT_ONCE = 32

_LIBRARY.define(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation,"
    " bool ceil_mode) -> Tensor"
)


def max_pool2d(x: Tensor, window: Sequence[Sequence[int]], ceil_mode: bool) -> Tensor:
    """Return the largest code of each window by ``torch.ops.torchq.max_pool2d``."""
    return torch.ops.torchq.max_pool2d(x, *window, ceil_mode)


def _anywhere(x: Tensor, *window: Any) -> Tensor:
    kernel, stride, padding, dilation = map(tuple, window[:4])
    return F.max_pool2d(x.float(), kernel, stride, padding, dilation, window[4]).to(torch.uint8)


def _cpu(x: Tensor, *window: Any) -> Tensor:
    # torch's own max_pool2d refuses uint8 images that are channels last. This operator for
    # quantized tensors takes plain ones as well and is ten times faster.
    if not x.numel() or x.dim() != 4 or not hasattr(torch.ops.quantized, "max_pool2d"):
        return _anywhere(x, *window)
    channels, last = x.shape[1], torch.channels_last
    missing = -channels % _AT_ONCE
    if not missing or not x.is_contiguous(memory_format=last):
        return torch.ops.quantized.max_pool2d(x, *window)
    # The channels that are left over are computed one by one: five times slower than padding.
    pooled = torch.ops.quantized.max_pool2d(F.pad(x, [0, 0, 0, 0, 0, missing]), *window)
    return pooled[:, :channels].contiguous(memory_format=last)


_LIBRARY.impl("max_pool2d", _anywhere, "CompositeExplicitAutograd")
_LIBRARY.impl("max_pool2d", _cpu, "CPU")
torch.library.register_fake("torchq::max_pool2d", _anywhere, lib=_LIBRARY)
