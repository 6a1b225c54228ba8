"""Stored weights of a file, their codes and their values, against those of the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchq.nn import QuantModule, TensorQuantizer
from torchq.onnx.ir import Node, Value, value_of
from torchq.onnx.passes.matmuls import TRANSPOSED
from torchq.onnx.qdq import qparams_of
from torchq.onnx.verify.metrics import Codes, LayerAgreement
from torchq.workflow import quantizers

#: Dequantized weights differ by the rounding of one product.
_WEIGHT_RTOL = 1e-6


def compare_weights(
    model: nn.Module,
    nodes: Mapping[str, Node],
    floats: Mapping[str, Value],
) -> list[LayerAgreement]:
    """Compare stored weights, their codes and their values, with those of the model."""
    paths = {id(quantizer): name for name, quantizer in quantizers(model).items()}
    rows = []
    for module in model.modules():
        if not isinstance(module, QuantModule):
            continue
        for quantizer, weight in module.quantized_weights():
            name = paths[id(quantizer)]
            if quantizer.quantizing and name in nodes:
                rows.append(_compare_weight(name, quantizer, weight.detach(), nodes[name]))
            elif quantizer.quantizing and name in floats:
                stored = value_of(floats[name])
                rows.append(_compare_float(name, quantizer, weight.detach(), stored))
    return rows


def _compare_float(
    name: str, quantizer: TensorQuantizer, weight: Tensor, found: Tensor
) -> LayerAgreement:
    """Compare a weight that is stored as the values of its codes."""
    values = quantizer.apply_own(weight.float()).detach().cpu()
    if values.shape != found.shape:
        return LayerAgreement(name, 0, 0, 0, 0, "has another shape in the file")
    wrong = int((~torch.isclose(found, values, rtol=_WEIGHT_RTOL, atol=0)).sum())
    largest = float((found - values).abs().max()) if found.numel() else 0.0
    layer = name.removesuffix(".weight_quantizer")
    return LayerAgreement(name, found.numel(), 0, wrong, largest, layers=(layer,))


def _compare_weight(
    name: str, quantizer: TensorQuantizer, weight: Tensor, node: Node
) -> LayerAgreement:
    """Compare a weight that is stored as codes; raised channels have the scales of the file."""
    codes = quantizer.codes(weight).float().cpu()
    values = quantizer.apply_own(weight.float()).detach().cpu()
    if not quantizer.descriptor.symmetric:
        codes = quantizer.qparams().centered(codes)
    found, stored, raised = qparams_of(node), value_of(node.inputs[0]), node.meta.get("raised")
    centered = found.centered(stored)
    dequantized = found.dequantize(centered)
    if str(node.inputs[0].name).endswith(TRANSPOSED):
        centered, dequantized = (t.t().reshape(codes.shape) for t in (centered, dequantized))
    elif raised:
        rounded = found.round(found.scaled(values))
        codes[raised], values[raised] = rounded[raised], found.dequantize(rounded)[raised]
    difference = ""
    if centered.shape == codes.shape:
        same = torch.isclose(dequantized, values, rtol=_WEIGHT_RTOL, atol=0)
        wrong = int((~same & (centered == codes)).sum())
        if wrong:
            difference = f"{wrong} equal codes have another value: their scales differ"
    row = Codes(name, 0.0, difference, (name.removesuffix(".weight_quantizer"),))
    row.add(centered, codes, centered)
    return row.result()
