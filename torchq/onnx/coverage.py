"""How much of a file computes on integers: its products whose two factors are codes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchq.onnx.dimensions import length_of
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    attribute,
    infer_shapes,
    is_constant,
    names,
    nodes_of,
    onnx_ir,
    readers,
)
from torchq.onnx.passes.constants import fold_lengths
from torchq.onnx.qdq import FLOAT_WEIGHT, pair_name, read_record, stored_weight
from torchq.runtime import PRODUCTS, Runtime

#: The entry of the record that holds the lengths of open dimensions in the example of an export.
EXAMPLE_LENGTHS = "example_lengths"
#: The entry that holds how many groups convolutions had before zeros were put between them: name of
#: the pair of the weight -> groups.
MERGED_GROUPS = "merged groups"

#: Operators of which each step multiplies the input and the hidden state by weights.
_RECURRENT = ("LSTM", "GRU", "RNN")
#: Layers that a reason names.
_SHOWN = 3
#: Operators that move numbers, so that codes stay codes.
_MOVES = names(
    "Cast Reshape Transpose Flatten Squeeze Unsqueeze Slice Gather Split Concat Expand Pad Identity"
)


@dataclass(frozen=True)
class Coverage:
    """The products of a file, and how many of them read codes alone.

    Attributes:
        share: of the multiply-adds, 0 to 1, as far as the shapes in the file tell them; None for a
            file without products.
        layers: how many operators multiply.
        on_integers: how many of them have codes as both factors.
        float_weights: names of those that read a weight in float.
        before_norms: names of those that read codes, but in front of a BatchNorm that was not
            folded, for which the runtime computes them in float.
        float_inputs: names of those of which an input is not quantized.
        float_kernels: names of those with quantized factors that the file hands to a float kernel
            of its runtime, with the values of the codes as weight.
    """

    share: float | None
    layers: int
    on_integers: int
    float_weights: tuple[str, ...]
    before_norms: tuple[str, ...]
    float_inputs: tuple[str, ...]
    float_kernels: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: Model, runtime: Runtime | None = None) -> Coverage:
        """Return the coverage of a file as it is written; its runtime may have fewer kernels.

        The graph gets the shapes of its values, which TorchScript leaves out.

        Args:
            graph: the file.
            runtime: that it is for; None for one that computes whatever stands in front of a
                BatchNorm in float.
        """
        infer_shapes(graph)
        nodes = _products_of(graph)
        sized = _of_known_lengths(graph)
        recorded = read_record(graph).get(MERGED_GROUPS)
        groups = recorded if isinstance(recorded, dict) else {}
        sizes = {
            node.outputs[0].name: _multiply_adds(node) * _part_of_groups(node, groups)
            for node in _products_of(sized)
        }
        work = {id(node): sizes.get(node.outputs[0].name, 0.0) for node in nodes}
        weights = [node for node in nodes if _has_float_weight(node)]
        coded = [node for node in nodes if _reads_codes(node)]
        kinds = PRODUCTS if runtime is None else runtime.float_before_norms
        norms = [
            node
            for node in coded
            if node.op_type in kinds and _stands_before_norm(node)
        ]
        integers = [node for node in coded if node not in norms]
        kernels = [node for node in nodes if _has_float_kernel(node)]
        named = [*weights, *coded, *kernels]
        others = [node for node in nodes if node not in named]
        total = sum(work.values())
        return cls(
            share=sum(work[id(node)] for node in integers) / total if total else None,
            layers=len(nodes),
            on_integers=len(integers),
            float_weights=tuple(map(_name, weights)),
            before_norms=tuple(map(_name, norms)),
            float_inputs=tuple(map(_name, others)),
            float_kernels=tuple(map(_name, kernels)),
        )

    def __str__(self) -> str:
        if self.share is None:
            return "no layers that multiply"
        return f"{self.share:.1%} of the multiply-adds read integers"

    @property
    def reason(self) -> str:
        """Return in a sentence why products are in float; empty where none is."""
        parts = [
            _counted(self.float_weights, "read a weight in float"),
            _counted(
                self.before_norms, "stand in front of a BatchNorm that was not folded"
            ),
            _counted(self.float_inputs, "read an input in float"),
            _counted(
                self.float_kernels,
                "are quantized and have float kernels, as their results are not quantized",
            ),
        ]
        return ", ".join(part for part in parts if part)


def _counted(layers: tuple[str, ...], what: str) -> str:
    if not layers:
        return ""
    shown = ", ".join(layers[:_SHOWN])
    more = ", ..." if len(layers) > _SHOWN else ""
    return f"{len(layers)} of its layers {what} ({shown}{more})"


def _products_of(graph: Model) -> list[Node]:
    """Return the nodes that multiply; an Einsum of one operand moves or adds numbers."""
    nodes = nodes_of(graph, *PRODUCTS, *_RECURRENT)
    return [node for node in nodes if len(_factors(node)) > 1]


def _stands_before_norm(node: Node) -> bool:
    return any(
        user.op_type == "BatchNormalization" for user in readers(node.outputs[0])
    )


def _name(node: Node) -> str:
    return str(node.name or node.outputs[0].name)


def _factors(node: Node) -> list[Value]:
    count = 3 if node.op_type in _RECURRENT else 2
    return [value for value in node.inputs[:count] if value is not None]


def _reads_codes(node: Node) -> bool:
    return node.op_type not in _RECURRENT and all(map(_is_code, _factors(node)))


def _has_float_weight(node: Node) -> bool:
    """Return True if one factor is stored, and not as codes."""
    return any(_is_stored_float(value) for value in _factors(node))


def _has_float_kernel(node: Node) -> bool:
    """Return True if one factor is stored as the float values of its codes."""
    sources = (_before_moves(value) for value in _factors(node))
    return any(str(source.name).endswith(FLOAT_WEIGHT) for source in sources)


def _is_stored_float(value: Value) -> bool:
    source = _before_moves(value)
    return is_constant(source) and not str(source.name).endswith(FLOAT_WEIGHT)


def _is_code(value: Value) -> bool:
    source = _before_moves(value)
    producer = source.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _before_moves(value: Value) -> Value:
    """Return the value that was moved into this place."""
    producer = value.producer()
    while producer is not None and producer.op_type in _MOVES:
        first = producer.inputs[0]
        if first is None:
            break
        value = first
        producer = value.producer()
    return value


def example_lengths(
    graph: Model, feeds: Mapping[str, Tensor], rows: int
) -> dict[str, int]:
    """Return the open lengths of a file by name, as its example has them; ``rows`` for a batch."""
    lengths: dict[str, int] = {}
    for value in graph.graph.inputs:
        example = feeds.get(str(value.name))
        dims = () if value.shape is None or example is None else tuple(value.shape)
        for number, dim in enumerate(dims):
            if isinstance(dim, int) or example is None:
                continue
            if number:
                lengths[str(dim.value)] = example.shape[number]
            else:
                lengths.setdefault(str(dim.value), rows)
    return lengths


def _recorded_lengths(graph: Model) -> dict[str, int]:
    """Return the lengths that an export noted; none from a record that is damaged."""
    recorded = read_record(graph).get(EXAMPLE_LENGTHS)
    entries = recorded.items() if isinstance(recorded, dict) else ()
    return {
        name: length
        for name, length in entries
        if isinstance(length, int) and length > 0
    }


def _of_known_lengths(graph: Model) -> Model:
    """Return a graph whose values have the shapes that the example of its model has.

    That is the graph itself where its lengths are known. Where some cannot be told, they count as
    1, and so do the samples, as such lengths may be those of a batch.
    """
    if all(_is_known(value.shape) for value in _values(graph)):
        return graph
    lengths = _recorded_lengths(graph)
    sized, is_complete = _sized(graph, lengths)
    if is_complete:
        return sized
    firsts = [value.shape[0] for value in graph.graph.inputs if value.shape]
    batches = {str(dim.value) for dim in firsts if not isinstance(dim, int)}
    one_sample = {n: v for n, v in lengths.items() if n not in batches}
    return _sized(graph, one_sample)[0]


def _sized(graph: Model, lengths: Mapping[str, int]) -> tuple[Model, bool]:
    """Return a copy whose values have lengths that are numbers, and whether all could be told.

    What follows from an open length, such as the windows of all images of a batch, has none that
    names could tell, so shapes are inferred again, from numbers.
    """
    is_complete = True
    noted = {value.name: value.shape for value in _values(graph)}
    sized = graph.clone()
    inputs = list(sized.graph.inputs)
    for value in _values(sized):
        is_input = value in inputs and value.shape is not None
        value.shape = (
            onnx_ir.Shape(_numbers(value.shape, lengths)) if is_input else None
        )
    infer_shapes(sized)
    if not all(_is_known(value.shape) for value in _values(sized)):
        # Inference follows no arithmetic that TorchScript writes for a view.
        fold_lengths(sized)
        infer_shapes(sized)
    # Where nothing can be inferred, the names tell what they can. Those that inference made up come
    # last, as more can be inferred from the others.
    for is_last in (False, True):
        for value in _values(sized):
            shape = noted.get(value.name)
            if _is_known(value.shape) or shape is None:
                continue
            if is_last or not any("unk__" in str(dim) for dim in shape):
                value.shape = onnx_ir.Shape(_numbers(shape, lengths))
                is_complete = is_complete and _are_known(shape, lengths)
        if not is_last and not all(_is_known(v.shape) for v in _values(sized)):
            infer_shapes(sized)
    return sized, is_complete


def _values(graph: Model) -> list[Value]:
    """Return the inputs and the results of all nodes."""
    return [*graph.graph.inputs, *(v for node in graph.graph for v in node.outputs)]


def _is_known(shape: Sequence[object] | None) -> bool:
    return shape is not None and all(isinstance(dim, int) for dim in shape)


def _are_known(shape: Iterable[Any], lengths: Mapping[str, int]) -> bool:
    """Return True if each length of a shape is a number, or a product of known names."""
    return all(
        isinstance(dim, int) or length_of(str(dim.value), lengths) is not None
        for dim in shape
    )


def _numbers(shape: Iterable[Any], lengths: Mapping[str, int]) -> list[int]:
    """Return the lengths of a shape; of names that are not known those count as 1 that are factors.

    Names may be terms.
    """
    return [
        dim
        if isinstance(dim, int)
        else length_of(str(dim.value), lengths)
        or math.prod(lengths.get(name, 1) for name in str(dim.value).split("*"))
        for dim in shape
    ]


def _multiply_adds(node: Node) -> float:
    """Return the products of one node; lengths that are not known count as 1."""
    factors = _factors(node)
    sizes = [math.prod(_dims(value)) for value in factors]
    if node.op_type in _RECURRENT:
        steps_and_samples = _dims(factors[0])[:2]
        return math.prod(steps_and_samples) * sum(sizes[1:])
    if node.op_type == "ConvTranspose":
        return _places(factors[0]) * sizes[1]
    if node.op_type == "Conv":
        return _places(node.outputs[0]) * sizes[1]
    if node.op_type == "Einsum":
        return math.prod(_lengths_by_letter(node).values())
    return math.prod(_dims(node.outputs[0])) * math.prod(_dims(factors[0])[-1:])


def _lengths_by_letter(node: Node) -> dict[str, int]:
    """Return the length of each letter of an Einsum; dimensions behind dots count from the end."""
    equation = str(attribute(node, "equation", "")).replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    lengths: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=False):
        dims = [] if value is None else _dims(value)
        first, _, last = term.partition("...")
        between = len(dims) - len(first) - len(last)
        names_of_dims = [*first, *(f"...{n}" for n in range(-between, 0)), *last]
        for name, length in zip(names_of_dims, dims, strict=False):
            lengths[name] = max(length, lengths.get(name, 1))
    return lengths


def _part_of_groups(node: Node, groups_before: Mapping[str, object]) -> float:
    """Return what part of the products are the model's, and none with zeros between its groups."""
    weight = stored_weight(node.inputs[1]) if node.op_type == "Conv" else None
    before = None if weight is None else groups_before.get(pair_name(weight))
    now = int(attribute(node, "group", 1))
    return now / before if isinstance(before, int) and before > now else 1.0


def _places(value: Value) -> int:
    """Return how many samples and positions a tensor has, whose second dimension is of channels."""
    dims = _dims(value)
    return math.prod(dims[:1]) * math.prod(dims[2:])


def _dims(value: Value) -> list[int]:
    return [] if value.shape is None else _numbers(value.shape, {})
