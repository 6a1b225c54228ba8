"""The integer operators in torch's own registry: ``torch.ops.torchq.int8_conv``, ``int8_linear``.

They take plain tensors and numbers, so that ``torch.compile``, ``torch.export`` with save and load,
and copies of models all work. Which kernel runs is decided inside: oneDNN's on a CPU that has it,
plain torch otherwise.

This is the one place where the arguments of kernels (:mod:`torchq.lowering.definition`) are taken
apart and put together.
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
    """Return which kernel an operator runs, and why nothing faster where that is the reference.

    Args:
        device: of the tensors.

    Returns:
        ``"onednn"`` or ``"reference"``; and a reason or "".
    """
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
    """Return the convolution of uint8 codes by ``torch.ops.torchq.int8_conv``.

    Args:
        x: uint8 codes, (N, C, ...) with 1 to 3 spatial dimensions.
        weights: of the layer.
        params: of the convolution.
        epilogue: what is done with the sums.
        residual: added to the result before the activation: floating point, or codes of the
            epilogue's residual.

    Returns:
        (N, out, ...), of the epilogue's dtype; channels last in memory on CPUs.
    """
    *output, scale, zero_point = epilogue
    return torch.ops.torchq.int8_conv(x, *weights, *params, *output, residual, scale, zero_point)


def int8_linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``activation(x @ weight.T + bias)`` by ``torch.ops.torchq.int8_linear``.

    Args:
        x: uint8 codes, (..., in).
        weights: of the layer.
        epilogue: what is done with the sums; without a residual.

    Returns:
        (..., out), of the epilogue's dtype.
    """
    *output, _, _ = epilogue
    return torch.ops.torchq.int8_linear(x, *weights, *output)


def _conv_operator(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``run``, which takes parameter objects, as a function of the operator's arguments.

    torch leaves out trailing arguments that have their default value.
    """

    def operator(x: Tensor, *flat: Any) -> Tensor:
        params = ConvParams(tuple(flat[5]), tuple(flat[6]), tuple(flat[7]), flat[8])
        epilogue = Epilogue(flat[9], flat[10], flat[11], flat[12], tuple(flat[13]), *flat[15:])
        residual = flat[14] if len(flat) > 14 else None
        return run(x, Int8Weights(*flat[:5]), params, epilogue, residual)

    return operator


def _linear_operator(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``run``, which takes parameter objects, as a function of the operator's arguments."""

    def operator(x: Tensor, *flat: Any) -> Tensor:
        epilogue = Epilogue(flat[5], flat[6], flat[7], flat[8], tuple(flat[9]))
        return run(x, Int8Weights(*flat[:5]), epilogue)

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
    residual: Tensor | None,
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


def _register() -> None:
    _LIBRARY.impl("int8_conv", _conv_operator(definition.conv), "CompositeExplicitAutograd")
    _LIBRARY.impl("int8_conv", _conv_operator(_conv_cpu), "CPU")
    torch.library.register_fake("torchq::int8_conv", _conv_operator(_conv_fake), lib=_LIBRARY)
    _LIBRARY.impl("int8_linear", _linear_operator(definition.linear), "CompositeExplicitAutograd")
    _LIBRARY.impl("int8_linear", _linear_operator(_linear_cpu), "CPU")
    torch.library.register_fake("torchq::int8_linear", _linear_operator(_linear_fake), lib=_LIBRARY)


_register()


#: The channels that torch's kernel computes at once.
_AT_ONCE = 32

_LIBRARY.define(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation,"
    " bool ceil_mode) -> Tensor"
)


def max_pool2d(x: Tensor, window: Sequence[Sequence[int]], ceil_mode: bool) -> Tensor:
    """Return the largest code of each window by ``torch.ops.torchq.max_pool2d``.

    Args:
        x: uint8, (N, C, H, W) or (C, H, W).
        window: kernel size, stride, padding and dilation, each for height and width.
        ceil_mode: as in :class:`torch.nn.MaxPool2d`.
    """
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
