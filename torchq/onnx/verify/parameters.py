"""What a file stores against what the model has: scales, zero points, weights and biases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from torchq.formats import IntFormat, integer_format
from torchq.functional import QParams
from torchq.functional.onnx_ops import onnx_axis, onnx_type
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.calls.modules import RoutedModule
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    computed_by,
    input_at,
    is_constant,
    readers,
    value_of,
)
from torchq.onnx.passes.matmuls import TRANSPOSED
from torchq.onnx.qdq import float_weights, qparams_of, weight_nodes
from torchq.onnx.verify.report import LayerAgreement
from torchq.workflow import quantizers

_WEIGHT = "weight_quantizer"


def pair_difference(quantizer: TensorQuantizer, quantize: Node) -> str:
    """Return what is wrong with the parameters of a Q/DQ pair; "" if nothing is."""
    difference = qparams_difference(quantizer.qparams(), qparams_of(quantize))
    for node in readers(quantize.outputs[0]):
        for index, what in ((1, "scale"), (2, "zero point")):
            if node.op_type == "DequantizeLinear" and not _same_input(
                quantize, node, index
            ):
                difference = (
                    difference
                    or f"QuantizeLinear and DequantizeLinear have different {what}s"
                )
    return difference


def _same_input(one: Node, other: Node, index: int) -> bool:
    first = input_at(one, index)
    second = input_at(other, index)
    if first is second:
        return True
    if not (is_constant(first) and is_constant(second)):
        return False
    # A strongly typed file may have the scales of a pair in two types.
    return _same(value_of(first).float(), value_of(second).float())


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


_SHORT = (torch.float16, torch.bfloat16)


def qparams_difference(of_model: QParams, of_file: QParams) -> str:
    """Return how parameters in a file differ from the model's; "" if they give the same values.

    Codes of fewer bits may be stored in a wider type, and codes of 8 bits and more with the other
    sign, which moves the zero point by half their number.
    """
    stored, _ = onnx_type(of_model.format)
    if isinstance(stored, IntFormat) and isinstance(of_file.format, IntFormat):
        if stored.width < of_file.format.width:
            stored = integer_format(of_file.format.width, unsigned=not stored.signed)
        of_model = replace(of_model, format=stored).stored(of_file.format.signed)
    expected, in_file = (
        (
            q.format.name,
            q.scale.detach().float().reshape(-1).cpu(),
            q.zero_point.reshape(-1).cpu(),
        )
        for q in (of_model, of_file)
    )
    same_format = expected[0] == in_file[0]
    if (
        same_format
        and _same(expected[1], in_file[1])
        and _same(*_numbers(expected, in_file))
    ):
        return ""
    return f"the file has {_text(*in_file)}; expected {_text(*expected)}"


def _numbers(*parameters: tuple[str, Tensor, Tensor]) -> Iterator[Tensor]:
    return (zero_point.float() for _, _, zero_point in parameters)


def _text(format: str, scale: Tensor, zero_point: Tensor) -> str:
    more = ", ..." if scale.numel() > 1 else ""
    return f"{format}, scale {float(scale[0]):.9g}{more}, zero point {float(zero_point[0]):g}"


def compare_weights(model: nn.Module, graph: Model) -> Iterator[LayerAgreement]:
    """Compare stored weights, their codes or the values of these, and biases with the model's."""
    nodes, floats = weight_nodes(graph), float_weights(graph)
    paths = {id(quantizer): name for name, quantizer in quantizers(model).items()}
    biases = {
        name: bias for name, bias in model.named_parameters() if name.endswith("bias")
    }
    routed = [module for module in model.modules() if isinstance(module, RoutedModule)]
    in_calls = {id(holder) for owner in routed for _, holder in owner.holders()}
    modules = [module for module in model.modules() if isinstance(module, QuantModule)]
    for module in modules:
        for quantizer, weight in module.quantized_weights():
            name = paths[id(quantizer)]
            if not quantizer.quantizing or name not in (*nodes, *floats):
                continue
            value = nodes[name].outputs[0] if name in nodes else floats[name]
            scaled = quantizer.scaled(weight.detach())
            if name in nodes:
                yield _compare_codes(name, quantizer, scaled, nodes[name])
            else:
                dequantized = quantizer.apply_own(scaled.float()).detach().cpu()
                yield compare_stored(name, dequantized, value_of(value))
            bias_name = name.removesuffix(_WEIGHT) + "bias"
            bias = biases.get(bias_name)
            if bias is not None:
                in_call = id(module) in in_calls
                yield from _compare_bias(bias_name, bias, value, in_call=in_call)


def compare_stored(
    name: str, expected: Tensor, in_file: Tensor, difference: str = ""
) -> LayerAgreement:
    """Return the agreement of numbers that have to be equal, in the type of the file."""
    if in_file.dtype in _SHORT:
        expected = expected.to(in_file.dtype)
    count = expected.numel()
    layer = (name.rpartition(".")[0],)
    if expected.shape != in_file.shape:
        shapes = (
            f"has the shape {tuple(in_file.shape)} in the file; "
            f"expected {tuple(expected.shape)}"
        )
        return LayerAgreement(name, count, 0, 0.0, 0, difference or shapes, layer)
    gap = (in_file.double() - expected.detach().double()).abs()
    largest = float(gap.nan_to_num(torch.inf).max()) if gap.numel() else 0.0
    # Written so that NaN counts as a difference.
    differing = int((~(gap == 0)).sum())
    return LayerAgreement(name, count, differing, largest, 0, difference, layer)


def _compare_codes(
    name: str, quantizer: TensorQuantizer, weight: Tensor, node: Node
) -> LayerAgreement:
    """Compare a weight that is stored as codes; raised channels have the scales of the file."""
    model_qparams = quantizer.qparams()
    file_qparams = qparams_of(node)
    stored = value_of(node.inputs[0])
    codes = quantizer.codes(weight).float().cpu()
    codes = codes if quantizer.descriptor.symmetric else model_qparams.centered(codes)
    centered = file_qparams.centered(stored)
    transposed = str(node.inputs[0].name).endswith(TRANSPOSED)
    if transposed:
        centered = centered.t().reshape(codes.shape)
    elif node.meta.get("raised"):
        raised = node.meta["raised"]
        values = quantizer.apply_own(weight.float()).detach().cpu()
        codes[raised] = file_qparams.round(file_qparams.scaled(values))[raised]
        scales = file_qparams.scale.reshape(-1)
        places = raised if scales.numel() > 1 else [0]
        raised_scale = _filled(model_qparams.scale, scales)
        raised_scale[places] = scales[places]
        model_qparams = replace(
            model_qparams,
            scale=raised_scale,
            zero_point=_filled(model_qparams.zero_point, scales),
        )
    axis, _ = onnx_axis(quantizer.descriptor.granularity, weight.dim())
    difference = qparams_difference(model_qparams, file_qparams)
    if axis is not None and file_qparams.axis != (1 - axis if transposed else axis):
        difference = difference or "has its scales on another axis in the file"
    return compare_stored(name, codes, centered, difference)


def _filled(parameters: Tensor, like: Tensor) -> Tensor:
    """Return a new float32 tensor of one number for each of ``like``."""
    flat = parameters.detach().float().reshape(-1).cpu()
    return flat.expand_as(like).clone() if flat.numel() == 1 else flat.clone()


def _compare_bias(
    name: str, bias: Tensor, weight: Value, *, in_call: bool
) -> Iterator[LayerAgreement]:
    """Compare the bias of the layer that reads a weight, where the file stores one for it.

    A function call with the weight of a layer, ``in_call``, may add another bias, or none.
    """
    for node in readers(weight):
        if node.op_type == "Cast":  # half precision
            yield from _compare_bias(name, bias, node.outputs[0], in_call=in_call)
            continue
        if node.op_type in ("Conv", "ConvTranspose", "Gemm"):
            stored_bias = input_at(node, 2)
        elif node.op_type == "MatMul" and len(adds := readers(node.outputs[0])) == 1:
            sources = [computed_by(v, "Unsqueeze", "Reshape") for v in adds[0].inputs]
            addends = [
                v if n is None else n.inputs[0]
                for v, n in zip(adds[0].inputs, sources, strict=True)
            ]
            stored_bias = next((v for v in addends if is_constant(v)), None)
            if adds[0].op_type != "Add" or stored_bias is None:
                continue
        else:
            continue
        if in_call and (stored_bias is None or stored_bias.name != name):
            continue
        if stored_bias is None:  # Exporters leave out zeros.
            yield compare_stored(
                name, bias.detach().cpu(), torch.zeros(bias.shape, device="cpu")
            )
        elif is_constant(stored_bias):
            yield compare_stored(
                name, bias.detach().cpu(), value_of(stored_bias).reshape(bias.shape)
            )
