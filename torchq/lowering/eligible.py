"""Which quantized modules have an integer layer that computes the same, and why others have none.

To lower another class, register a function with :data:`LOWERINGS`; it returns the layer, or the
reason why there is none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.formats import IntFormat, PerAxis, PerTensor
from torchq.lowering.kernel import ConvParams
from torchq.lowering.layer import DynamicInt8Linear, Int8Conv, Int8Linear
from torchq.lowering.qparams import ByteQParams
from torchq.nn import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantLinear,
    QuantModule,
    TensorQuantizer,
    convert_,
)
from torchq.nn.integer_bias import kernel_bias
from torchq.utils import Registry, copy_module

Lowering = Callable[[QuantModule], "nn.Module | str"]

#: Quantized class -> function of the module -> integer layer, or why there is none. An
#: entry also serves subclasses that compute the same.
LOWERINGS: Registry[type, Lowering] = Registry("lowering of")
#: Why a layer with a quantized weight has no integer kernel. Placement for an ONNX target leaves
#: inputs float where the target's runtime has no integer kernel for the layer.
FLOAT_INPUT = "its input is not quantized"


def lower(module: QuantModule) -> nn.Module | str:
    """Return the integer layer for ``module``, or the reason why there is none."""
    base = next((cls for cls in type(module).__mro__ if cls in LOWERINGS), None)
    if base is None:
        return f"no integer kernel for {type(module).__name__}"
    computes = ("forward", "_conv_forward")
    is_overridden = any(
        getattr(type(module), n, None) is not getattr(base, n, None) for n in computes
    )
    if is_overridden or "forward" in vars(module):
        return f"{type(module).__name__} has a forward of its own"
    with torch.no_grad():
        return LOWERINGS[base](module)


def active(quantizer: nn.Module | None) -> TensorQuantizer | None:
    """Return the quantizer if it quantizes, else None."""
    return (
        quantizer
        if isinstance(quantizer, TensorQuantizer) and quantizer.quantizing
        else None
    )


def integer_weight(
    quantizer: TensorQuantizer, weight: Tensor
) -> tuple[Tensor, Tensor] | str:
    """Return a weight as integers, as the simulation rounds it, or why that cannot be."""
    d = quantizer.descriptor
    format = d.format
    if not isinstance(format, IntFormat) or format.quant_max > 127:
        return f"weight format {format} does not fit int8"
    if isinstance(d.granularity, PerAxis):
        per_output = [a % weight.dim() for a in d.granularity.axes] == [0]
    else:
        per_output = isinstance(d.granularity, PerTensor)
    if not per_output:
        return "weight ranges are neither per tensor nor per output channel"
    if not d.symmetric:
        return "weight ranges are asymmetric"
    if quantizer.delegate is not None:
        return "a quantizer has a delegate"
    if not d.fake_quant:
        return "a quantizer returns codes"
    weight = quantizer.scaled(weight)
    codes = quantizer.codes(weight)
    scale = quantizer.qparams(weight.detach().to(torch.float32)).scale
    scales = scale.flatten().expand(weight.shape[0])
    return codes.contiguous().to(torch.int8), scales.contiguous()


def as_linear(
    weight: Tensor, bias: Tensor | None, of_input: nn.Module, of_weight: nn.Module
) -> QuantLinear:
    """Return a product of a layer with several as a linear layer of its own, to be lowered."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    linear = convert_(layer)
    assert isinstance(linear, QuantLinear)
    linear.input_quantizer, linear.weight_quantizer = of_input, of_weight
    return linear


def _arguments(module: QuantModule) -> tuple[Any, ...] | str:
    """Return the arguments of an :class:`Int8Layer`, or why there is none."""
    x = active(module.input_quantizer)
    w = active(module.weight_quantizer)
    if w is None:
        return "its weight is not quantized"
    if x is None:
        return FLOAT_INPUT
    if x.descriptor.dynamic:
        return "the range of its input is taken from each call"
    if not x.descriptor.fake_quant:
        return "a quantizer returns codes"
    qparams = ByteQParams.of(x)
    if isinstance(qparams, str):
        return qparams
    layer: Any = module
    codes = integer_weight(w, layer.weight.detach())
    if isinstance(codes, str):
        return codes
    return (
        *codes,
        kernel_bias(layer, layer.bias),
        qparams,
        layer.weight.dtype,
        x.pre_quant_scale,
    )


@LOWERINGS.register(QuantConv1d)
@LOWERINGS.register(QuantConv2d)
@LOWERINGS.register(QuantConv3d)
def _conv(module: QuantModule) -> nn.Module | str:
    conv: Any = module
    padding = conv.padding
    if padding == "valid":
        padding = (0,) * len(conv.kernel_size)
    elif padding == "same":
        widths = zip(conv.dilation, conv.kernel_size, strict=True)
        total = [d * (k - 1) for d, k in widths]
        if any(t % 2 for t in total):
            return "its padding differs at the two ends"
        padding = tuple(t // 2 for t in total)
    if conv.padding_mode != "zeros" and any(padding):
        return f"its padding is not zeros but {conv.padding_mode}"
    arguments = _arguments(module)
    if isinstance(arguments, str):
        return arguments
    params = ConvParams(
        tuple(conv.stride), tuple(padding), tuple(conv.dilation), conv.groups
    )
    return _with_output(Int8Conv(params, *arguments), module)


def _with_output(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Return a lowered layer with the quantizer of its result behind it, where it has one."""
    output = active(getattr(module, "output_quantizer", None))
    if output is None:
        return layer
    between = (
        [nn.ReLU()]
        if output.descriptor.unsigned and output.descriptor.symmetric
        else []
    )
    return nn.Sequential(layer, *between, copy_module(output))


@LOWERINGS.register(QuantLinear)
def _linear(module: QuantModule) -> nn.Module | str:
    layer: Any = module
    x = active(module.input_quantizer)
    w = active(module.weight_quantizer)
    if x is None or w is None or not x.descriptor.dynamic:
        arguments = _arguments(module)
        if isinstance(arguments, str):
            return arguments
        return _with_output(Int8Linear(*arguments), module)
    if problem := _dynamic_problem(x):
        return problem
    codes = integer_weight(w, layer.weight.detach())
    if isinstance(codes, str):
        return codes
    lowered = DynamicInt8Linear(*codes, layer.bias, x.descriptor, layer.weight.dtype)
    return _with_output(lowered, module)


def _dynamic_problem(quantizer: TensorQuantizer) -> str:
    """Return why kernels do not compute the scales and codes of an input; empty if they do."""
    d = quantizer.descriptor
    if not isinstance(d.format, IntFormat) or d.format.bits > 8:
        return f"format {d.format} has no 8-bit integer kernel"
    if quantizer.pre_quant_scale is not None or not d.fake_quant:
        return "its dynamic input has a scale in front, or codes as result"
    if not isinstance(d.granularity, PerTensor | PerAxis):
        return "its dynamic input has blocks"
    if isinstance(d.granularity, PerAxis) and -1 in d.granularity.axes:
        return "its dynamic input has a range per feature"
    if quantizer.delegate is not None:
        return "a quantizer has a delegate"
    if not d.symmetric:
        return "its input has an asymmetric range of each call"
    usual = d.rounding == "half_even" and not d.power_of_two
    return "" if usual else "its input has power-of-two scales or another rounding"
