"""Qualcomm QNN (the HTP backend), read through ONNX Runtime's QNN execution provider.

Sources: the provider's documentation (quantized models as Q/DQ, uint8 or uint16 activations,
symmetric int8 weights) and pull request 20154 of microsoft/onnxruntime (several scales for the
weight of a convolution). Files are checked against these rules; none was run on a device.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torchq.config import QuantConfig
from torchq.descriptor import QuantDescriptor
from torchq.onnx.ir import Model, data_type, is_constant, nodes_of
from torchq.onnx.passes.convolutions import fit_biases
from torchq.onnx.qdq import (
    element_type,
    format_of,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
)
from torchq.runtime import Codes, FileRules, Placement, Runtime
from torchq.runtimes.checks import (
    ACTIVATIONS,
    AVG_POOLS,
    LAYERS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
    layer_name,
    scales_of,
    weight_of,
)
from torchq.runtimes.chips import layers
from torchq.swap.layers import one_weight_scale


def check_activation_types(model: Model) -> Iterator[str]:
    """Yield activations that are not uint8 or uint16 with one scale."""
    for node in nodes_of(model, "QuantizeLinear"):
        if not all(is_constant(value) for value in node.inputs[1:]):
            continue
        format = format_of(element_type(node))
        if not format.is_integer or format.signed or format.bits not in (8, 16):
            yield f"{pair_name(node)}: QNN takes uint8 or uint16 activations; use 8 or 16 bits"
        if len(scales_of(node)) > 1:
            yield (
                f"{pair_name(node)}: QNN takes one scale for an activation; "
                "use a descriptor without axis"
            )


def check_weights(model: Model) -> Iterator[str]:
    """Yield weights that are not symmetric int8, or have scales per channel outside a Conv."""
    for node in nodes_of(model, *LAYERS):
        weight = weight_of(node)
        if weight is None:
            continue
        if data_type(weight.inputs[0]).name != "INT8" or not qparams_of(weight).has_zero_point(0):
            yield f"{layer_name(node)}: QNN takes symmetric int8 weights; use 8 signed bits"
        if node.op_type != "Conv" and len(scales_of(weight)) > 1:
            yield (
                f"{layer_name(node)}: QNN takes one scale for the weight of a {node.op_type}; "
                "use quantize_ with target='qnn', or a weight descriptor without axis"
            )


def check_float_outputs(model: Model) -> Iterator[str]:
    """Yield layers with a quantized weight whose output is not quantized."""
    for node in nodes_of(model, *LAYERS):
        if weight_of(node) is None:
            continue
        if not leads_only_to_quantizers(node.outputs[0], "Relu", "Clip", "Add"):
            yield (
                f"{layer_name(node)}: its output is not quantized, and QNN's kernels are integer "
                "from end to end; put torchq.nn.QuantIdentity() behind it"
            )


def recipe() -> QuantConfig:
    """Return what the provider reads: asymmetric activations and symmetric weights."""
    return layers("qnn", QuantDescriptor(unsigned=True, symmetric=False), QuantDescriptor())


#: Classes of layers whose weight has one scale.
_ONE_SCALE = (
    "torch.nn.modules.linear.*",
    "torch.nn.modules.conv.ConvTranspose[123]d",
    "torch.nn.modules.activation.MultiheadAttention",
)
QNN = Runtime(
    name="qnn",
    recipe=recipe,
    placement=Placement(
        operators=frozenset(
            ["add", "mul", "maximum", "cat", "pool", "matmul", "attention", "activation"]
        ),
        modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
    ),
    adapting=(partial(one_weight_scale, _ONE_SCALE),),
    codes=Codes(stored="unsigned", widths=(8, 16), fitted=True),
    file=FileRules(
        passes=(fit_biases,),
        checks=(
            partial(
                check_unfolded_norms,
                "two layers for QNN, which wants the result between quantized",
                LAYERS,
            ),
            check_activation_types,
            check_weights,
            check_float_outputs,
            check_one_range_per_tensor,
        ),
    ),
    limits=("Biases stay float; the provider rounds them to int32.",),
    versions="its provider's documents",
    proved="structure alone",
    timer="onnxruntime_perf_test -e qnn -i backend_path|libQnnHtp.so {file}",
)
