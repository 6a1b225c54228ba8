"""Files in which each product reads stored codes of its own, for sessions that rewrite these.

A layer that runs several times, such as the head of a detector on each level of a pyramid, is one
set of stored codes with several readers, and so are layers whose codes are equal. With
``session.x64quantprecision`` ONNX Runtime stores unsigned codes beside those of each product,
under the name of the signed ones, and fails at the second product that reads the same (version
1.32: "Attempt to replace the existing tensor").
"""

from __future__ import annotations

import os

from torchq.onnx.ir import (
    Model,
    Node,
    add_initializer,
    data_type,
    fresh_name,
    input_at,
    is_constant,
    is_output,
    load_model,
    nodes_of,
    onnx_ir,
    readers,
    serde,
    stored_size,
    value_of,
)

#: What may stand between stored codes and the product that reads them.
_MOVES = ("Transpose", "Reshape", "Unsqueeze", "Squeeze")
#: Bytes that a session is given in memory at most; a message of protobuf ends at 2 GiB.
_LARGEST = 1_800_000_000


def with_weights_apart(path: str | os.PathLike[str]) -> bytes | None:
    """Return a file with copies of the stored codes that several nodes read.

    None where there are none of these, or where the copies make it too large for one message.
    """
    model = load_model(path, check=False)
    shared = _shared_codes(model)
    equal = _equal_codes(model)
    if not shared and not equal:
        return None
    for node in shared:
        _separate(node)
    for node in equal:
        _own_codes(node)
    if stored_size(model) > _LARGEST:
        return None
    return bytes(serde.serialize_model(model).SerializeToString())


def _shared_codes(model: Model) -> list[Node]:
    """Return the nodes of stored codes with several readers, those next to the readers first."""
    shared = []
    for node in reversed(nodes_of(model, "DequantizeLinear", *_MOVES)):
        if _reads_stored_codes(node) and not is_output(node.outputs[0]):
            shared.append(node)
    return [node for node in shared if _is_read_several_times(node)]


def _equal_codes(model: Model) -> list[Node]:
    """Return the nodes that read codes which an earlier one reads, as those of equal layers."""
    seen = set()
    equal = []
    for node in nodes_of(model, "DequantizeLinear"):
        if is_constant(node.inputs[0]):
            if node.inputs[0] in seen:
                equal.append(node)
            seen.add(node.inputs[0])
    return equal


def _reads_stored_codes(node: Node) -> bool:
    """Return True for stored codes as values, moved or not."""
    if node.op_type == "DequantizeLinear":
        return is_constant(node.inputs[0])
    producer = None if node.inputs[0] is None else node.inputs[0].producer()
    return producer is not None and (
        producer.op_type in ("DequantizeLinear", *_MOVES)
        and _reads_stored_codes(producer)
    )


def _is_read_several_times(node: Node) -> bool:
    """Return True where several products read the values, behind moves of their own or not."""
    reading = readers(node.outputs[0])
    return len(reading) > 1 or any(
        reader.op_type in _MOVES and _is_read_several_times(reader)
        for reader in reading
    )


def _separate(node: Node) -> None:
    """Give every reader of a node but the first a copy of it, with stored codes of its own."""
    for user, index in list(node.outputs[0].uses())[1:]:
        name = fresh_name(node.graph, f"{node.name}/apart")
        copy = onnx_ir.Node(
            node.domain,
            node.op_type,
            list(node.inputs),
            list(node.attributes.values()),
            outputs=[onnx_ir.Value(name=name)],
            name=name,
        )
        node.append(copy)
        user.replace_input_with(index, copy.outputs[0])
        if node.op_type == "DequantizeLinear":
            _own_codes(copy)


def _own_codes(node: Node) -> None:
    """Give a node codes and a zero point of its own."""
    for place in (0, 2):
        stored = input_at(node, place)
        if stored is not None:
            copy = add_initializer(
                node.graph, str(stored.name), value_of(stored), data_type(stored)
            )
            node.replace_input_with(place, copy)
