"""Mutations of files: of bytes, of the data in a checkpoint, of an ONNX graph, of JSON.

Each function gets a :class:`random.Random`, so a number that seeds it names one mutation for ever.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

# Values that a reader may not expect.
HOSTILE: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.0, -0.5, 1e39, 1e308,
    math.inf, -math.inf, math.nan, "", "x", "int8", "../../etc", "a.b.c", "__class__", "0", "\x00",
    "z\", None) or exit() or getattr(self, \"0", "x" * 10_000, [], {}, [[]], {"": None}, [None] * 3,
    {"a": {"b": {}}}, [1, [2, [3, [4]]]],
]  # fmt: skip


def mutate_bytes(rng: Random, data: bytes) -> bytes:
    """Return ``data`` with one to four spans flipped, cut, doubled, zeroed or moved."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not out:
            break
        start = rng.randrange(len(out))
        end = min(len(out), start + rng.choice([1, 1, 2, 4, 8, 64, 1024]))
        kind = rng.randrange(6)
        if kind == 0:
            out[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[start:end] = bytes(rng.randrange(256) for _ in range(end - start))
        elif kind == 2:
            del out[start:end]
        elif kind == 3:
            out[start:start] = out[start:end]
        elif kind == 4:
            out[start:end] = bytes([rng.choice([0, 127, 128, 255])]) * (end - start)
        else:
            del out[start:]
    return bytes(out)


# --- nested data ---------------------------------------------------------------------------------


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container in nested data with each of its keys."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in list(children):
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child)


def _mutable(value: Any) -> Any:
    """Return a copy of nested data in which tuples are lists, so that all of it can be changed."""
    if isinstance(value, dict):
        return {key: _mutable(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [_mutable(child) for child in value]
    return value.clone() if isinstance(value, Tensor) else copy.copy(value)


def _deep(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def _hostile(rng: Random) -> Any:
    return _deep(900) if rng.random() < 0.01 else copy.deepcopy(rng.choice(HOSTILE))


def _mutate_tensor(rng: Random, x: Tensor) -> Any:
    """Return something instead of a tensor: other values, another shape, dtype or layout."""
    changed: list[Callable[[], Any]] = [
        lambda: torch.full_like(x, math.nan) if x.is_floating_point() else x - 1,
        lambda: torch.full_like(x, math.inf) if x.is_floating_point() else x * 0,
        lambda: -x.abs() - 1 if x.dtype != torch.bool else ~x,
        lambda: x.to(torch.complex64),
        lambda: x.to(torch.int64),
        lambda: x.to(torch.float64),
        lambda: x.to_sparse() if x.dim() else x,
        lambda: x.unsqueeze(0),
        lambda: x.flatten()[:0],
        lambda: x.new_zeros(()),
        lambda: x.new_zeros(3, 5),
        lambda: x.new_zeros(1).expand(2**40),
        lambda: torch.empty(x.shape, dtype=x.dtype, device="meta"),
        lambda: x.flatten()[:1].expand(x.shape) if x.numel() else x,
        lambda: _hostile(rng),
    ]
    return rng.choice(changed)()


def mutate_data(rng: Random, data: Any) -> Any:
    """Return nested data with one to three entries replaced, removed, renamed or moved."""
    out = _mutable(data)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(out))
        if not places:
            break
        container, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[
                rng.choice(["", "x", "0", key + "x" if isinstance(key, str) else 7])
            ] = container.pop(key)
        elif kind == 2:
            other, name = rng.choice(places)
            container[key] = (
                _mutable(other[name]) if name in _keys(other) else _hostile(rng)
            )
        elif isinstance(container[key], Tensor):
            container[key] = _mutate_tensor(rng, container[key])
        else:
            container[key] = _hostile(rng)
    return out


def _keys(container: Any) -> Any:
    return container if isinstance(container, dict) else range(len(container))


def mutate_checkpoint(rng: Random, source: Path, path: Path) -> None:
    """Write a checkpoint with other data than ``source``, or with other bytes."""
    if rng.random() < 0.15:
        path.write_bytes(mutate_bytes(rng, source.read_bytes()))
        return
    data = torch.load(source, weights_only=True)
    try:
        torch.save(mutate_data(rng, data), path)
    # Not every tensor can be written.
    except (
        NotImplementedError,
        RuntimeError,
        RecursionError,
    ):
        path.write_bytes(mutate_bytes(rng, source.read_bytes()))


def mutate_json(rng: Random, text: str) -> str:
    """Return JSON with other data than ``text``, or text that may be no JSON at all."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, text.encode()).decode(errors="replace")
    if rng.random() < 0.01:
        return "[" * 100_000
    return json.dumps(mutate_data(rng, json.loads(text)))


# --- ONNX ----------------------------------------------------------------------------------------


def mutate_onnx(rng: Random, source: Path, path: Path) -> None:
    """Write an ONNX file with another graph than ``source``, or with other bytes."""
    import onnx

    if rng.random() < 0.4:
        path.write_bytes(mutate_bytes(rng, source.read_bytes()))
        return
    model = onnx.load(source)
    for _ in range(rng.randint(1, 3)):
        _mutate_graph(rng, model)
    path.write_bytes(model.SerializeToString())


def _mutate_graph(rng: Random, model: Any) -> None:
    graph = model.graph
    node, tensor = (
        rng.choice(parts) if parts else None
        for parts in (graph.node, graph.initializer)
    )
    kinds: list[Callable[[], object]] = [
        lambda: node.input.pop() if node.input else None,
        lambda: node.output.pop() if node.output else None,
        lambda: node.input.append(rng.choice(graph.node).name),
        lambda: setattr(
            node, "op_type", rng.choice(["Conv", "Identity", "DequantizeLinear", "X"])
        ),
        lambda: setattr(node, "domain", "x"),
        lambda: setattr(
            node, "name", rng.choice(["", "x", rng.choice(graph.node).name])
        ),
        lambda: graph.node.remove(node),
        lambda: graph.node.add().CopyFrom(node),
        lambda: node.attribute.pop() if node.attribute else None,
        lambda: [
            setattr(a, "i", rng.choice([-1, 0, 7, 2**40])) for a in node.attribute
        ],
        lambda: graph.initializer.remove(tensor),
        lambda: tensor.dims.append(rng.choice([0, 2, -1, 2**40])),
        lambda: tensor.dims.pop() if tensor.dims else None,
        lambda: setattr(tensor, "data_type", rng.randrange(26)),
        lambda: setattr(
            tensor, "raw_data", mutate_bytes(rng, tensor.raw_data or b"\0")
        ),
        lambda: setattr(tensor, "raw_data", b""),
        lambda: setattr(
            model.opset_import[0], "version", rng.choice([0, 1, 13, 19, 99])
        ),
        lambda: graph.ClearField(
            rng.choice(["input", "output", "value_info", "initializer"])
        ),
        lambda: _swap_inputs(rng, graph),
    ]
    if node is not None and tensor is not None:
        rng.choice(kinds)()


def _swap_inputs(rng: Random, graph: Any) -> None:
    """Exchange one input of two nodes, which may close a circle."""
    one = rng.choice(graph.node)
    two = rng.choice(graph.node)
    if one.input and two.input:
        one.input[0], two.input[0] = two.input[0], one.input[0]
