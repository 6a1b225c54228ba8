"""Quantized files: pairs of QuantizeLinear and DequantizeLinear become quantizers."""

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.descriptor import QuantDescriptor
from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NUMBERS, NodeContext, Quantization, converter
from torchq.frontends.onnx.reader import dtype_of
from torchq.nn import TensorQuantizer, convert_

_FLOAT8 = {torch.float8_e4m3fn: (4, 3), torch.float8_e5m2: (5, 2)}
_CODES = NUMBERS | set(_FLOAT8) | {torch.uint16}


def quantizer_of(found: Quantization, ndim: int | None) -> TensorQuantizer | None:
    """Return a quantizer with the range of a file, None where no format has its zero point."""
    places: dict[str, Any] = {}
    shape: list[int] = []
    if found.block_size:
        if ndim is None or found.scale.dim() != ndim:
            return None
        places = {
            "block_size": found.block_size,
            "block_axis": found.axis % ndim - ndim,
        }
        shape = list(found.scale.shape)
    elif found.scale.numel() > 1:
        if ndim is None:
            return None
        places = {"axis": found.axis % ndim}
        shape = [1 if d != places["axis"] else -1 for d in range(ndim)]
    descriptor = _descriptor_of(found, places)
    if descriptor is None:
        return None
    quantizer = TensorQuantizer(descriptor)
    point = found.zero_point.to(torch.int32).expand(found.scale.shape).reshape(shape)
    quantizer.set_qparams(
        found.scale.reshape(shape), None if descriptor.symmetric else point
    )
    return quantizer


def _descriptor_of(
    found: Quantization, places: dict[str, Any]
) -> QuantDescriptor | None:
    """Return a descriptor of the codes and zero point of a file, None where no format has them."""
    dtype, zero_point = found.zero_point.dtype, found.zero_point
    bits = found.bits or 8 * dtype.itemsize
    if dtype in _FLOAT8:
        return QuantDescriptor(_FLOAT8[dtype], **places)
    if dtype not in (torch.int8, torch.uint8, torch.int16, torch.uint16):
        return None
    unsigned = dtype in (torch.uint8, torch.uint16)
    if dtype is torch.uint8 and bool((zero_point == 1 << bits - 1).all()):
        return QuantDescriptor(bits, **places)
    if bool(zero_point.any()) or dtype is torch.uint16:
        return QuantDescriptor(bits, unsigned=unsigned, symmetric=False, **places)
    return QuantDescriptor(bits, unsigned=unsigned, **places)


def module_name(node: NodeContext, weight: Constant) -> str:
    """Return where to put a module: the owner of its weight where names tell, else the node."""
    match = re.fullmatch(
        r"(.+?)[./](weight|weight_quantizer[./].*)", weight.name or weight.origin
    )
    return match[1] if match else node.name


def weighted(
    node: NodeContext,
    module: nn.Module,
    weight: Constant,
    x: Value,
    transposed: bool = False,
) -> Value:
    """Call a layer, or its quantized twin with the file's ranges if it stores codes."""
    builder = node.builder
    name = module_name(node, weight)
    quantized_weight = builder.weights.get(weight)
    if quantized_weight is not None and transposed:
        quantized_weight = quantized_weight.permuted((1, 0))
    weight_quantizer = (
        None
        if quantized_weight is None
        else quantizer_of(quantized_weight, weight.tensor.dim())
    )
    if weight_quantizer is None:
        result = node.module(module, x, name=name)
        if isinstance(result, fx.Node):
            result.meta["onnx_weight"] = weight.name
        return result
    source, of_input = (
        builder.quantizers.get(x, (x, None)) if isinstance(x, fx.Node) else (x, None)
    )
    input_descriptor = None if of_input is None else of_input.descriptor
    convert_(module, input=input_descriptor, weight=weight_quantizer.descriptor)
    module.weight_quantizer = weight_quantizer
    if of_input is not None:
        module.input_quantizer = of_input
    return node.module(module, source, name=name)


def _parameters(
    node: NodeContext,
    scale_index: int,
    zero_index: int,
    axis: int,
    dtype: torch.dtype | None,
) -> Quantization | None:
    """Return the scale and zero point of a node where both are known, else None."""
    scale = node.constant(scale_index)
    zero_point = node.constant(zero_index)
    if scale is None or (zero_point is None and node.input(zero_index) is not None):
        return None
    if zero_point is None:
        if dtype is None:
            return None
        zero_point = torch.zeros(scale.shape, dtype=torch.float32).to(dtype)
    is_narrow = any(value in node.builder.four_bits for value in node.inputs)
    bits = 4 if is_narrow else 0
    block_size = node.attr("block_size", 0)
    return Quantization(scale.float(), zero_point, axis, bits, block_size)


def _code_type(node: NodeContext) -> torch.dtype:
    point_dtype = node.dtype(2) if node.input(2) is not None else None
    output_dtype = dtype_of(node.attr("output_dtype", 0))
    if node.attr("output_dtype", 0) and output_dtype is None:
        node.refuse("torch has no type for its codes")
    return point_dtype or output_dtype or torch.uint8


@converter("QuantizeLinear", dtypes=frozenset(_CODES))
def _quantize(node: NodeContext) -> Value:
    if node.input(2) in node.builder.four_bits:
        node.refuse("codes of four bits that the network computes are not supported")
    axis = node.attr("axis", 1)
    block_size = node.attr("block_size", 0)
    dtype = _code_type(node)
    result = node.call(
        quantize_linear,
        node.inputs[0],
        node.inputs[1],
        node.input(2),
        axis,
        block_size,
        dtype,
    )
    parameters = _parameters(node, 1, 2, axis, dtype)
    if isinstance(result, fx.Node) and parameters is not None and not block_size:
        node.builder.codes[result] = (node.inputs[0], parameters)
    return result


@converter("DequantizeLinear", dtypes=frozenset(_CODES))
def _dequantize(node: NodeContext) -> Value:
    axis = node.attr("axis", 1)
    block_size = node.attr("block_size", 0)
    value = node.inputs[0]
    parameters = _parameters(node, 1, 2, axis, node.dtype(0))
    if (
        isinstance(value, fx.Node)
        and parameters is not None
        and value in node.builder.codes
    ):
        source, code_parameters = node.builder.codes[value]
        if code_parameters.equals(parameters) and node.dtype(1) in (
            torch.float32,
            None,
        ):
            quantized = _fake_quantized(node, source, parameters, value)
            if quantized is not None:
                return quantized
    result = node.call(
        dequantize_linear, value, node.inputs[1], node.input(2), axis, block_size
    )
    if (
        isinstance(result, Constant)
        and parameters is not None
        and isinstance(value, Constant)
    ):
        origin = re.sub(r"(_quantized|_q|\.quantized|/codes)$", "", value.name)
        result = Constant(result.tensor, "", origin)
        if value.tensor.dtype is not torch.int32:
            node.builder.weights[result] = parameters
    return result


def _fake_quantized(
    node: NodeContext, source: Value, found: Quantization, codes: fx.Node
) -> Value:
    """Return the call of one quantizer for all readers of codes, None where no format has them."""
    dequantized = node.builder.dequantized.get(codes)
    if dequantized is not None:
        return dequantized
    shape = node.shape(0)
    quantizer = quantizer_of(found, None if shape is None else len(shape))
    if quantizer is None:
        return None
    result = node.module(quantizer, source, name=_quantizer_name(node))
    if isinstance(result, fx.Node):
        node.builder.quantizers[result] = (source, quantizer)
    node.builder.dequantized[codes] = result
    return result


def _quantizer_name(node: NodeContext) -> str:
    """Return where to put a quantizer: the name of the node without the operator."""
    name = re.sub(r"[./_]DequantizeLinear(_\d+)?$", "", node.name)
    # A path of its own: the layer may take the path of the name.
    name = re.sub(r"[./]+", "_", name)
    return name if name.endswith("quantizer") else f"{name}_quantizer"


def aligned(part: Tensor, x: Tensor, axis: int, block_size: int = 0) -> Tensor:
    """Return a scale or zero point (one, one per index of ``axis``, or blocks) to broadcast."""
    if block_size:
        return part.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    if part.numel() == 1:
        return part.reshape(())
    shape = [1] * x.dim()
    shape[axis % x.dim()] = -1
    return part.view(shape)


@one_call
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    axis: int,
    block_size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return ``saturate(round(x / scale) + zero_point)``, ties to even; FP8 rounds its own way."""
    scale = aligned(scale, x, axis, block_size)
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        ratio = x.float() / scale.float()
        return torch.where(ratio.isnan(), ratio, ratio.clamp(-largest, largest)).to(
            dtype
        )
    codes = torch.round(x / scale)
    if zero_point is not None:
        codes = codes + aligned(zero_point, x, axis, block_size).to(codes.dtype)
    bounds = torch.iinfo(dtype)
    return codes.clamp(bounds.min, bounds.max).to(dtype)


@one_call
def dequantize_linear(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, axis: int, block_size: int
) -> Tensor:
    """Return ``(codes - zero_point) * scale`` in the element type of the scale."""
    scale = aligned(scale, codes, axis, block_size)
    values = (
        codes.to(torch.int64) if not codes.dtype.is_floating_point else codes.float()
    )
    if zero_point is not None:
        zero_point = aligned(zero_point, codes, axis, block_size)
        exact = torch.float32 if zero_point.dtype.is_floating_point else torch.int64
        values = values - zero_point.to(exact)
    return values.to(scale.dtype) * scale
