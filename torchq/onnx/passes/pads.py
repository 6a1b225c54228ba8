"""Zeros around images as pads of the convolutions that read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    Value,
    are_constant,
    attribute,
    bypass,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    readers,
    run_passes,
    set_attribute,
    value_of,
)
from torchq.onnx.passes.shapes import fold_shapes
from torchq.onnx.qdq import (
    axis_of,
    pair_name,
    quantizer_nodes,
    read_record,
    stored_weight,
    write_record,
)
from torchq.utils.optional import import_optional

_FOLDED = "folded pads"
#: Elements added to each dimension: in front of all of them, then behind all, as ONNX has them.
Amounts: TypeAlias = tuple[int, ...]


def _fold_pads(model: Model) -> None:
    """Let convolutions add the zeros that a Pad adds in front of them.

    Runtimes do this where nothing stands between the two. Where a quantizer does, the convolution
    in front of the Pad returns floats, which are copied and then quantized.

    Before: Pad with zeros around images, and convolutions or Q/DQ pairs in front of such as its
    only readers.
    After: The convolutions have larger pads, and the pairs, for which 0 is 0, read what Pad read.
    The record has under ``folded pads`` what was added in front of each quantizer.
    """
    folded: dict[str, list[int]] = dict(read_record(model).get(_FOLDED, {}))
    for node in reversed(nodes_of(model, "Pad")):  # Of two in a row, the second one comes first.
        behind = _Readers.of(node.outputs[0])
        amounts = None if behind is None else _zeros_around(node, behind.dims)
        if behind is None or amounts is None:
            continue
        bypass(node)
        for convolution in behind.convolutions:
            pads = zip(_pads(convolution), _spatial(amounts), strict=True)
            set_attribute(convolution, "pads", [a + b for a, b in pads])
            convolution.attributes.pop("auto_pad", None)
        for pair in behind.pairs:
            pair.outputs[0].shape = None
            if pair.op_type == "QuantizeLinear":
                before = folded.get(pair_name(pair), [0] * len(amounts))
                folded[pair_name(pair)] = [a + b for a, b in zip(before, amounts, strict=True)]
    if folded:
        write_record(model, **{_FOLDED: folded})


def _note_folded(model: Model) -> dict[str, str]:
    """Note at each quantizer, under ``meta["pads"]``, what a Pad in front of it added."""
    record = read_record(model).get(_FOLDED, {})
    for name, node in quantizer_nodes(model).items():
        node.meta["pads"] = tuple(record.get(name, ()))
    return {}


fold_pads = Rewrite(_fold_pads, undo=_note_folded)


def without_pads(x: Tensor, amounts: Amounts) -> Tensor:
    """Return ``x`` without what a Pad has added; ``x`` itself for no amounts."""
    for dim in range(len(amounts) // 2):
        behind = amounts[len(amounts) // 2 + dim]
        x = x.narrow(dim, amounts[dim], x.shape[dim] - amounts[dim] - behind)
    return x


def constant_fill(pad: Node) -> float | None:
    """Return the number that a Pad adds; None where it is not stored, or repeats elements."""
    fill = input_at(pad, 2)
    if attribute(pad, "mode", "constant") != "constant" or not (fill is None or is_constant(fill)):
        return None
    return float(attribute(pad, "value", 0) if fill is None else value_of(fill).item())


def with_lengths(graph: bytes, shapes: Iterable[tuple[str, Sequence[int]]]) -> bytes:
    """Return an ONNX file for inputs of known lengths, where it has fewer Pad nodes.

    How many zeros "same" padding adds in front of a layer with strides depends on the lengths of
    the image. Where these are open, the file computes the number and pads in a node of its own,
    which :func:`fold_pads` has to leave. The first dimension, that of the batch, stays as it is. It
    is ``graph`` itself where these lengths would remove no Pad.
    """
    if b"Pad" not in graph:
        return graph
    onnx = import_optional("onnx", "torchq.onnx")
    model = onnx_ir.from_proto(onnx.load_model_from_string(graph))
    known = dict(shapes)
    for value in model.graph.inputs:
        if value.name in known and value.shape is not None:
            value.shape = onnx_ir.Shape([*value.shape[:1], *known[value.name][1:]])
    before = len(nodes_of(model, "Pad"))
    run_passes(model, (fold_shapes, fold_pads))
    if len(nodes_of(model, "Pad")) == before:
        return graph
    changed: bytes = onnx_ir.to_proto(model).SerializeToString()
    return changed


class _Readers:
    """What reads a value, through Q/DQ pairs."""

    def __init__(self) -> None:
        self.pairs: list[Node] = []
        self.convolutions: list[Node] = []

    @classmethod
    def of(cls, value: Value) -> _Readers | None:
        """Return what reads ``value``; None where that is not convolutions alone."""
        found = cls()
        return found if found._add(value) and found.dims else None

    def _add(self, value: Value) -> bool:
        if is_output(value):
            return False
        for node in readers(value):
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                self.pairs.append(node)
                if not _is_same_at_each_pixel(node) or not self._add(node.outputs[0]):
                    return False
            elif node.op_type == "Conv" and attribute(node, "auto_pad", "NOTSET") in _EXPLICIT:
                self.convolutions.append(node)
            else:
                return False
        return True

    @property
    def dims(self) -> int:
        """The number of dimensions of the value; 0 where no stored weight shows it."""
        return min(map(_dims, self.convolutions), default=0)


#: Values of ``auto_pad`` with which the attribute ``pads`` counts.
_EXPLICIT = ("NOTSET", "VALID")


def _is_same_at_each_pixel(node: Node) -> bool:
    """Return True for a quantizer with one scale, or one for each channel."""
    if attribute(node, "block_size", 0) or not is_constant(node.inputs[1]):
        return False
    return node.inputs[1].const_value.size == 1 or axis_of(node) == 1


def _zeros_around(pad: Node, dims: int) -> Amounts | None:
    """Return what a Pad adds to all dimensions; None if it does not add zeros around images."""
    counts, chosen = input_at(pad, 1), input_at(pad, 3)
    if constant_fill(pad) != 0 or not are_constant([counts, chosen]):
        return None
    given = attribute(pad, "pads", ()) if counts is None else value_of(counts).tolist()
    axes = range(dims) if chosen is None else value_of(chosen).tolist()
    if len(given) != 2 * len(axes):
        return None
    amounts = [0] * (2 * dims)
    for number, axis in enumerate(axes):
        amounts[axis % dims] = given[number]
        amounts[axis % dims + dims] = given[number + len(axes)]
    others = (*amounts[:2], *amounts[dims : dims + 2])
    return None if any(others) or min(amounts) < 0 else tuple(amounts)


def _spatial(amounts: Amounts) -> list[int]:
    """Return amounts without those of the batch and the channels."""
    dims = len(amounts) // 2
    return [*amounts[2:dims], *amounts[dims + 2 :]]


def _dims(convolution: Node) -> int:
    """Return the number of dimensions of a stored weight; 0 for one that is computed."""
    weight = stored_weight(convolution.inputs[1])
    stored = convolution.inputs[1] if weight is None else weight.inputs[0]
    return len(stored.const_value.shape) if is_constant(stored) else 0


def _pads(convolution: Node) -> list[int]:
    return list(attribute(convolution, "pads", ())) or [0] * (2 * (_dims(convolution) - 2))
