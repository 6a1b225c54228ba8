"""Rules that several runtimes have, and what those of single runtimes are written with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchq.onnx.ir import Model, Node, Value, computed_by, nodes_of, value_of
from torchq.onnx.qdq import FLOAT_WEIGHT, pair_name, stored_weight

CONVOLUTIONS = ("Conv", "ConvTranspose")
LAYERS = (*CONVOLUTIONS, "Gemm", "MatMul")
MAX_POOLS = "type:torch.nn.modules.pooling.MaxPool[123]d"
AVG_POOLS = "type:torch.nn.modules.pooling.*AvgPool[123]d"
#: Activations that no runtime fuses into a convolution. Without a quantizer in front of them, the
#: convolution would have to return floats.
ACTIVATIONS = tuple(
    f"type:torch.nn.modules.activation.{name}"
    for name in (
        "SiLU",
        "Hardswish",
        "Hardsigmoid",
        "LeakyReLU",
        "ELU",
        "Mish",
        "Sigmoid",
    )
)


def layer_name(node: Node) -> str:
    """Return the module of a layer, from its weight's quantizer, or else the node's name."""
    # The place may be empty, as that of a Resize is.
    weight = node.inputs[1] if len(node.inputs) > 1 else None
    stored = "" if weight is None else str(weight.name)
    if stored.endswith(f".weight_quantizer{FLOAT_WEIGHT}"):
        return stored.removesuffix(f".weight_quantizer{FLOAT_WEIGHT}")
    producer = computed_by(weight)
    while producer is not None and producer.op_type in ("Cast", "Transpose"):
        producer = computed_by(producer.inputs[0])
    name = "" if producer is None else str(producer.name or "")
    if name.endswith("/DequantizeLinear") and ".weight_quantizer" in name:
        return name.partition(".weight_quantizer")[0]
    return str(node.name or node.outputs[0].name)


def weight_of(node: Node) -> Node | None:
    """Return the DequantizeLinear of a layer's stored weight."""
    return stored_weight(node.inputs[1]) if len(node.inputs) > 1 else None


def dequantized(value: Value) -> Node | None:
    """Return the DequantizeLinear that computes ``value``."""
    return computed_by(value, "DequantizeLinear")


def scales_of(node: Node) -> tuple[float, ...]:
    """Return the scales of a QuantizeLinear or DequantizeLinear; none where they are not stored."""
    scale = node.inputs[1]
    return (
        tuple(value_of(scale).float().reshape(-1).tolist()) if scale.const_value else ()
    )


def check_one_range_per_tensor(model: Model) -> Iterator[str]:
    """Yield tensors that are quantized with different scales."""
    groups: dict[Value, list[Node]] = {}
    for node in nodes_of(model, "QuantizeLinear"):
        groups.setdefault(node.inputs[0], []).append(node)
    for nodes in groups.values():
        if len({scales_of(node) for node in nodes}) > 1:
            names = ", ".join(sorted(pair_name(node) for node in nodes))
            yield (
                f"{names}: quantize one tensor with different scales; "
                "use torchq.qat.share_range_, or quantize_(..., example=...)"
            )


def layers_in_front_of_norms(model: Model, kinds: Sequence[str]) -> list[str]:
    """Return the names of quantized layers with a BatchNorm behind them that was not folded.

    Args:
        model: the graph.
        kinds: the operators that count.
    """
    layers = []
    for node in nodes_of(model, "BatchNormalization"):
        layer = computed_by(node.inputs[0], *kinds)
        if layer is not None and has_quantized_weight(layer):
            layers.append(layer_name(layer))
    return layers


def has_quantized_weight(node: Node) -> bool:
    """Return True for a layer whose weight has codes, also where their values are stored."""
    return weight_of(node) is not None or FLOAT_WEIGHT in str(node.inputs[1].name)


def check_unfolded_norms(
    effect: str, kinds: Sequence[str], model: Model
) -> Iterator[str]:
    """Yield one sentence on BatchNorms behind quantized layers, if there are any.

    Args:
        effect: what the runtime does with such layers.
        kinds: the operators that it does this with.
        model: the graph.
    """
    layers = layers_in_front_of_norms(model, kinds)
    if layers:
        yield norms_text(layers, effect, was_fused=bool(model.meta.get("fused")))


def norms_text(layers: Sequence[str], effect: str, *, was_fused: bool = False) -> str:
    """Return what a runtime does with BatchNorms behind layers, and how to fold them.

    Of a model that ``fuse_`` has seen, those that are left were refused.
    """
    hidden = len(layers) - _NAMES
    more = f" and {hidden} more" if hidden > 0 else ""
    advice = (
        "torchq.fuse_ refused it, and print(torchq.fuse_(model.eval(), example)) says why"
        if was_fused
        else "torchq.fuse_(model.eval(), example) folds it and keeps their codes"
    )
    return (
        f"{effect}, as a BatchNorm follows: {len(layers)} layers, {', '.join(layers[:_NAMES])}"
        f"{more}; {advice}"
    )


_NAMES = 6
