"""How many dimensions the tensors of a symbol have, as far as its operators tell.

A symbol does not state shapes. But a convolution tells the number of dimensions of its input and
of its output, and most operators keep it: so the number is known for nearly every tensor.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from torchq.frontends.mxnet.symbol import Symbol, SymbolNode

#: (number of a node, number of its output).
Output = tuple[int, int]

#: Operators whose first output has as many dimensions as their first input.
_KEEPS_FIRST = frozenset(
    {
        "Activation", "BatchNorm", "BatchNorm_v1", "BlockGrad", "Cast", "Crop", "Dropout",
        "InstanceNorm", "L2Normalization", "LRN", "LayerNorm", "LeakyReLU",
        "LinearRegressionOutput", "LogisticRegressionOutput", "MAERegressionOutput", "MakeLoss",
        "Pad", "Softmax", "SoftmaxActivation", "SoftmaxOutput", "SwapAxis", "UpSampling",
        "_DivScalar", "_MinusScalar", "_MulScalar", "_PlusScalar", "_PowerScalar", "_RDivScalar",
        "_RMinusScalar", "_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D",
        "_contrib_SyncBatchNorm", "_copy", "_div_scalar", "_maximum_scalar", "_minimum_scalar",
        "_minus_scalar", "_mul_scalar", "_plus_scalar", "_power_scalar", "_rdiv_scalar",
        "_rminus_scalar", "abs", "amp_cast", "cast", "clip", "erf", "exp", "hard_sigmoid",
        "identity", "log", "log_softmax", "negative", "pad", "relu", "sigmoid", "slice",
        "slice_axis", "slice_like", "softmax", "softsign", "sqrt", "square", "swapaxes", "tanh",
        "transpose",
    }
)  # fmt: skip
#: Operators whose inputs and first output have equally many dimensions.
_KEEPS_ALL = frozenset(
    {
        "Concat", "ElementWiseSum", "_Div", "_Minus", "_Mul", "_Plus", "_add", "_div", "_minus",
        "_mul", "_plus", "_sub", "add_n", "concat", "elemwise_add", "elemwise_div",
        "elemwise_mul", "elemwise_sub",
    }
)  # fmt: skip
#: Operators whose attribute ``kernel`` tells the number of dimensions.
_WINDOWED = frozenset({"Convolution", "Convolution_v1", "Deconvolution", "Pooling", "Pooling_v1"})
#: Operators on images.
_IMAGES = frozenset(
    {"Crop", "LRN", "UpSampling", "_contrib_AdaptiveAvgPooling2D", "_contrib_BilinearResize2D"}
)


def infer_ndims(symbol: Symbol, params: Mapping[str, Tensor]) -> dict[Output, int]:
    """Return the number of dimensions of each output of a node that is known.

    Args:
        symbol: the network.
        params: its parameters by name.
    """
    known: dict[Output, int] = {}
    for number, node in enumerate(symbol.nodes):
        stated = _length(node.attributes.get("__shape__", ""))
        if node.is_variable and node.name in params:
            known[number, 0] = params[node.name].dim()
        elif node.is_variable and stated:
            known[number, 0] = stated
    operators = [(n, node) for n, node in enumerate(symbol.nodes) if not node.is_variable]
    for _ in range(4):  # each round carries numbers through the whole network, in both directions
        before = len(known)
        for number, node in (*operators, *reversed(operators)):
            _spread(known, number, node)
        if len(known) == before:
            break
    return known


def _length(text: str) -> int:
    """Return how many items a tuple has in its text, 0 if that is not known."""
    return len([item for item in text.strip("()[] ").split(",") if item.strip()])


def _spread(known: dict[Output, int], number: int, node: SymbolNode) -> None:
    """Carry numbers between the inputs and the outputs of one operator."""
    result, inputs = (number, 0), node.inputs
    equal: list[Output] = []
    if node.op in _KEEPS_ALL:
        equal = [result, *inputs]
    elif node.op in _KEEPS_FIRST or node.op in _WINDOWED:
        equal = [result, *inputs[:1]]
    found = next((known[output] for output in equal if output in known), None)
    if node.op in _WINDOWED and found is None:
        spatial = _length(node.attributes.get("kernel", ""))
        found = spatial + 2 if spatial else None
    elif node.op in _IMAGES:
        found = 4
    for output in equal if found is not None else ():
        known.setdefault(output, found)  # type: ignore[arg-type]
    size = _size_of_result(known, node)
    if size is not None:
        known.setdefault(result, size)


def _size_of_result(known: dict[Output, int], node: SymbolNode) -> int | None:
    """Return the number of dimensions of a result that differs from that of the input."""
    first = known.get(node.inputs[0]) if node.inputs else None
    if node.op in ("Flatten", "flatten"):
        return 2
    if node.op == "FullyConnected":
        flat = node.attributes.get("flatten", "True") in ("True", "true", "1")
        return 2 if flat else first
    if node.op in ("Reshape", "reshape"):
        text = node.attributes.get("shape", "")
        codes = [item.strip(" L") for item in text.strip("()[] ").split(",") if item.strip()]
        return len(codes) if codes and not {"-2", "-3", "-4"} & set(codes) else None
    if node.op == "expand_dims":
        return None if first is None else first + 1
    if node.op.startswith("broadcast_"):
        ndims = [known.get(source) for source in node.inputs]
        return None if None in ndims else max(ndims, default=None)  # type: ignore[type-var]
    return None
