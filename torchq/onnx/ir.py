"""A thin handle on an ONNX ModelProto: who produces and reads what, and edits that keep the graph whole."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.utils.optional import need

__all__ = ["DTYPES", "FLOAT_TYPES", "Graph", "load_graph"]

#: ONNX element types that torch can hold as they are.
DTYPES: dict[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
    17: torch.float8_e4m3fn,
    19: torch.float8_e5m2,
}
FLOAT_TYPES = frozenset([1, 10, 11, 16])
_UINT4, _INT4 = 21, 22
_EXTERNAL_ABOVE = 1_800_000_000  # protobuf ends at 2 GiB


class Graph:
    """The main graph of ``model``, with indexes that every edit through this class keeps right.

    Attributes:
        model: the ModelProto; changed in place.
        initializers: name -> TensorProto.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.proto = model.graph
        self.initializers: dict[str, Any] = {t.name: t for t in self.proto.initializer}
        self.reindex()

    def reindex(self) -> None:
        """Look at the nodes again, after their inputs were edited from outside."""
        self._producer: dict[str, Any] = {}
        self._readers: dict[str, list[Any]] = {}
        for node in self.proto.node:
            for name in node.output:
                self._producer[name] = node
            for name in _names_read(node):
                self._readers.setdefault(name, []).append(node)
        self.inputs = {v.name for v in self.proto.input}
        self.outputs = {v.name for v in self.proto.output}
        used = {*self._producer, *self._readers, *self.initializers, *self.inputs}
        self._taken = used | {node.name for node in self.proto.node}

    @property
    def nodes(self) -> list[Any]:
        """The nodes in order, as a list; it does not follow later edits."""
        return list(self.proto.node)

    @property
    def opset(self) -> int:
        """Version of the default domain."""
        return next((o.version for o in self.model.opset_import if o.domain in ("", "ai.onnx")), 0)

    @property
    def float_size(self) -> int:
        """Bytes that the initializers would take in float32."""
        return 4 * sum(math.prod(tensor.dims) for tensor in self.initializers.values())

    def of(self, *kinds: str) -> Iterator[Any]:
        """The nodes of some operator types."""
        yield from (node for node in self.nodes if node.op_type in kinds)

    def producer(self, name: str) -> Any | None:
        """The node that computes ``name``; None for inputs and initializers."""
        return self._producer.get(name)

    def readers(self, name: str) -> list[Any]:
        """The nodes that read ``name``, also from inside a branch or loop body; one that reads it twice is listed twice."""
        return list(self._readers.get(name, ()))

    def is_output(self, name: str) -> bool:
        """Whether the model returns ``name``."""
        return name in self.outputs

    def fresh(self, base: str) -> str:
        """``base``, or ``base#2``, ...: a name that nothing has."""
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}#{count}"
        self._taken.add(name)
        return name

    def value(self, name: str) -> Tensor:
        """The initializer ``name`` as a tensor (a copy); int4 and uint4 come as int8 and uint8."""
        proto = self.initializers[name]
        if proto.data_type in (_INT4, _UINT4):
            return _unpack4(proto)
        array = need("onnx.numpy_helper", "torchq.onnx").to_array(proto)
        if proto.data_type in (16, 17, 19):  # numpy has no such dtypes; the bits are what counts
            bits = torch.from_numpy(
                array.view("int16" if proto.data_type == 16 else "uint8").copy()
            )
            return bits.view(DTYPES[proto.data_type])
        return torch.from_numpy(array.copy()) if array.flags.writeable else torch.tensor(array)

    def add_initializer(self, name: str, value: Tensor, kind: int | None = None) -> str:
        """Store ``value`` under a fresh name made from ``name`` and return that. ``kind``: ONNX type, for int4 and uint4."""
        onnx = need("onnx", "torchq.onnx")
        number = kind or next(number for number, dtype in DTYPES.items() if dtype == value.dtype)
        proto = onnx.TensorProto(name=self.fresh(name), data_type=number, dims=list(value.shape))
        flat = value.detach().cpu().contiguous().reshape(-1)
        proto.raw_data = (
            _pack4(flat) if number in (_INT4, _UINT4) else flat.view(torch.uint8).numpy().tobytes()
        )
        self.proto.initializer.append(proto)
        self.initializers[proto.name] = self.proto.initializer[-1]
        return str(proto.name)

    def replace_uses(self, old: str, new: str) -> None:
        """Every node that reads ``old`` reads ``new``. Model outputs keep their name: the producer of ``new`` must then be renamed."""
        for node in self.readers(old):
            _rename_read(node, old, new)
        self._readers.setdefault(new, []).extend(self._readers.pop(old, []))

    def bypass(self, node: Any) -> None:
        """Take out a node with one input and one output; what read its output reads its input. Call :meth:`remove` after."""
        source, result = node.input[0], node.output[0]
        self.replace_uses(result, source)
        if self.is_output(result):
            self.rename(source, result)

    def rename(self, old: str, new: str) -> None:
        """Give the value ``old`` the name ``new`` everywhere."""
        producer = self.producer(old)
        if producer is not None:
            for index, name in enumerate(producer.output):
                if name == old:
                    producer.output[index] = new
            self._producer[new] = self._producer.pop(old)
        self.replace_uses(old, new)

    def rename_initializer(self, old: str, new: str) -> None:
        """Give the initializer ``old`` the name ``new``."""
        self.initializers[new] = self.initializers.pop(old)
        self.initializers[new].name = new
        self.replace_uses(old, new)

    def remove(self, nodes: Iterable[Any]) -> None:
        """Take nodes out of the graph."""
        gone = {id(node) for node in nodes}
        for index in reversed(range(len(self.proto.node))):
            if id(self.proto.node[index]) in gone:
                del self.proto.node[index]
        if gone:
            self.reindex()

    def add(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> Any:
        """Append a node called as its output, and return it; :meth:`sort` brings it to its place."""
        helper = need("onnx.helper", "torchq.onnx")
        self.proto.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        node = self.proto.node[-1]
        self._producer[output] = node
        for name in inputs:
            self._readers.setdefault(name, []).append(node)
        return node

    def sort(self) -> None:
        """Bring the nodes into an order where everything is computed before it is read."""
        place: dict[str, int] = {}
        ready = {*self.inputs, *self.initializers}
        waiting = self.nodes
        while waiting:
            later = []
            for node in waiting:
                if all(name in ready or name not in self._producer for name in _names_read(node)):
                    place[node.output[0]] = len(place)
                    ready.update(node.output)
                else:
                    later.append(node)
            if len(later) == len(waiting):
                raise ExportError(f"{later[0].name}: the graph has a cycle; expected none")
            waiting = later
        self.proto.node.sort(key=lambda node: place[node.output[0]])
        self.reindex()

    def prune(self) -> None:
        """Drop nodes whose results nobody reads, then unused initializers and stale type information."""
        while dead := [
            n
            for n in self.proto.node
            if not any(self._readers.get(o) or o in self.outputs for o in n.output)
        ]:
            self.remove(dead)
        for index in reversed(range(len(self.proto.initializer))):
            name = self.proto.initializer[index].name
            if name not in self._readers and name not in self.outputs:
                del self.proto.initializer[index]
        self.initializers = {t.name: t for t in self.proto.initializer}
        for index in reversed(range(len(self.proto.value_info))):
            if self.proto.value_info[index].name not in self._producer:
                del self.proto.value_info[index]

    def save(self, path: Path, *, check: bool = True) -> int:
        """Check and write the model; tensors go to ``path + ".data"`` where one file cannot hold them. Returns the bytes."""
        onnx = need("onnx", "torchq.onnx")
        data = path.with_name(path.name + ".data")
        size = sum(len(t.raw_data) for t in self.proto.initializer)
        if size < _EXTERNAL_ABOVE:
            if check:
                onnx.checker.check_model(self.model)
            onnx.save_model(self.model, str(path))
            return path.stat().st_size
        data.unlink(missing_ok=True)
        onnx.save_model(self.model, str(path), save_as_external_data=True, location=data.name)
        if check:
            onnx.checker.check_model(str(path))
        return path.stat().st_size + data.stat().st_size


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a model file."""
    return Graph(need("onnx", "torchq.onnx").load_model(str(path)))


def _bodies(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _names_read(node: Any) -> Iterator[str]:
    yield from (name for name in node.input if name)
    for body in _bodies(node):
        for inner in body.node:
            yield from _names_read(inner)
        yield from (value.name for value in body.output)


def _rename_read(node: Any, old: str, new: str) -> None:
    for index, name in enumerate(node.input):
        if name == old:
            node.input[index] = new
    for body in _bodies(node):
        for inner in body.node:
            _rename_read(inner, old, new)


def _pack4(flat: Tensor) -> bytes:
    """Two codes in a byte, the first in the low half."""
    codes = torch.nn.functional.pad(flat.to(torch.int16) & 15, (0, flat.numel() % 2))
    return (codes[0::2] | codes[1::2] << 4).to(torch.uint8).numpy().tobytes()


def _unpack4(proto: Any) -> Tensor:
    count = math.prod(proto.dims)
    raw = proto.raw_data or bytes(proto.int32_data)
    packed = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8)
    )
    codes = torch.stack([packed & 15, packed >> 4], dim=1).reshape(-1)[:count]
    if proto.data_type == _INT4:
        codes = ((codes.to(torch.int16) ^ 8) - 8).to(torch.int8)
    return codes.reshape(list(proto.dims))
