"""The operators If, Loop and Scan: what sub-graphs compute becomes modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.errors import FrontendError
from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.onnx.context import GraphBuilder, NodeContext, converter


@converter("If", dtypes=None)
def _if(node: NodeContext) -> list[Value]:
    condition = node.constant(0)
    branches = [node.attr(name, object) for name in ("then_branch", "else_branch")]
    if condition is not None:
        return node.builder.convert_nodes(
            branches[0 if bool(condition.reshape(-1)[0]) else 1]
        )
    counts = [len(graph.output) for graph in branches]
    if counts != [len(node.output_names)] * 2:
        node.refuse(
            f"its branches have {counts} outputs; expected {len(node.output_names)}"
        )
    values = node.builder.values
    names = _outer_names(node, *branches)
    modules = [_branch(node.builder, graph, names) for graph in branches]
    flag: Any = node.inputs[0]
    # Sizes decide: a flag, which exporters know while they trace.
    if isinstance(flag, Ints):
        flag = flag.items[0]
    result = node.module(Conditional(*modules), flag, *(values[name] for name in names))
    return [result] if counts[0] == 1 else node.parts(counts[0], result)


def _outer_names(node: NodeContext, *graphs: Any) -> list[str]:
    """Return the values that the network computes and sub-graphs read."""
    values = node.builder.values
    read = dict.fromkeys(name for graph in graphs for name in _read(graph))
    own = {info.name for graph in graphs for info in graph.input}
    return [
        name
        for name in read
        if name not in own and isinstance(values.get(name), (fx.Node, Ints))
    ]


def _read(graph: Any) -> Iterator[str]:
    """Yield the names that a sub-graph reads, its own too."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from _read(attribute.g)
    yield from (output.name for output in graph.output)


def _branch(outer: GraphBuilder, graph: Any, names: Sequence[str]) -> fx.GraphModule:
    """Return a sub-graph as a module that takes its own inputs and the values of ``names``."""
    inner = outer.inside()
    inputs = [*(info.name for info in graph.input), *names]
    for name in inputs:
        inner.values[name] = node = inner.input(name)
        node.meta["onnx_name"] = name
    end = NodeContext(inner, "output", "output", 1, {}, [], [], [])
    outputs = [end.tensor(value) for value in inner.convert_nodes(graph)]
    output_names = [output.name for output in graph.output]
    return inner.finish(
        outputs, graph.name or "Branch", inputs, output_names, [None] * len(inputs)
    )


class Conditional(nn.Module):
    """Calls one of two modules, whichever a condition says: the ONNX operator If."""

    is_traced_whole = True

    def __init__(self, then_branch: nn.Module, else_branch: nn.Module) -> None:
        super().__init__()
        self.then_branch, self.else_branch = then_branch, else_branch

    def forward(self, condition: Tensor | bool, *values: Any) -> Any:
        """Return what the chosen branch makes of ``values``."""
        if isinstance(condition, Tensor):
            condition = bool(condition.reshape(-1)[0])
        return (self.then_branch if condition else self.else_branch)(*values)


@converter("Loop", dtypes=None)
def _loop(node: NodeContext) -> list[Value]:
    body = node.attr("body", object)
    count, condition = _count(node), node.input(1)
    states = list(node.inputs[2:])
    if count is None and condition is None:
        node.refuse("it has neither a count nor a condition, so that it never ends")
    scans = len(body.output) - 1 - len(states)
    if len(body.input) != len(states) + 2 or scans < 0:
        node.refuse(
            f"its body has {len(body.input)} inputs and {len(body.output)} outputs; "
            f"expected those of {len(states)} states"
        )
    names = _outer_names(node, body)
    module = _branch(node.builder, body, names)
    hands_on = _hands_on(module, body.input[1].name)
    if condition is None and not hands_on:
        node.refuse(
            "its condition is left out, and its body computes one, which the standard ignores "
            "and runtimes do not; expected both or none"
        )
    if hands_on and isinstance(condition, Constant) and bool(condition.tensor.all()):
        condition = None
    empties = _empties(node, body.output[1 + len(states) :])
    loop = Repeated(module, node.name, len(states), empties)
    return _called(node, loop, count, condition, states, [], names)


@converter("Scan", dtypes=None)
def _scan(node: NodeContext) -> list[Value]:
    body = node.attr("body", object)
    scanned = node.attr("num_scan_inputs", int)
    states, inputs = list(node.inputs[:-scanned]), list(node.inputs[-scanned:])
    outputs = len(body.output) - len(states)
    if not 0 < scanned <= len(node.inputs) or len(body.input) != len(node.inputs):
        node.refuse(
            f"its body has {len(body.input)} inputs, {scanned} of them scanned; expected "
            f"those of {len(node.inputs)} inputs"
        )
    axes = node.attr("scan_input_axes", [0] * scanned)
    backwards = node.attr("scan_input_directions", [0] * scanned)
    output_axes = node.attr("scan_output_axes", [0] * outputs)
    prepended = node.attr("scan_output_directions", [0] * outputs)
    names = _outer_names(node, body)
    loop = Scanned(
        _branch(node.builder, body, names),
        len(states),
        list(zip(axes, backwards, strict=True)),
        list(zip(output_axes, prepended, strict=True)),
        _empties(node, body.output[len(states) :]),
    )
    return _called(node, loop, None, None, states, inputs, names)


def _count(node: NodeContext) -> Any:
    """Return how often a loop runs at most: a number, what computes it, or None."""
    value = node.input(0)
    if isinstance(value, Constant):
        return int(value.tensor.reshape(-1)[0])
    return value.items[0] if isinstance(value, Ints) else value


def _hands_on(body: fx.GraphModule, name: str) -> bool:
    """Return True if the condition that a body gives is that which it got, or always true."""
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    first = output.args[0]
    first = first[0] if isinstance(first, tuple) else first
    if first.op == "get_attr":
        return bool(body.get_buffer(str(first.target)).all())
    return first.op == "placeholder" and first.meta.get("onnx_name") == name


def _empties(node: NodeContext, outputs: Sequence[Any]) -> list[tuple[list[int], Any]]:
    """Return the sizes and types of what a body gives to be stacked, as far as known."""
    builder = node.builder
    return [
        (
            [size or 0 for size in builder.shapes.get(info.name, [])],
            builder.dtypes.get(info.name),
        )
        for info in outputs
    ]


def _called(
    node: NodeContext,
    loop: Repeated | Scanned,
    count: Any,
    condition: Value,
    states: list[Value],
    scanned: list[Value],
    names: Sequence[str],
) -> list[Value]:
    """Call a module that runs a body several times, also where all it reads is known."""
    loop.eval()
    builder = node.builder
    outer = [builder.values[name] for name in names]
    tensors = [node.tensor(value) for value in (*states, *scanned, *outer)]
    flag = None if condition is None else node.tensor(condition)
    head = (count, flag) if isinstance(loop, Repeated) else ()
    path = builder.add_module(node.name, loop, node.op_type)
    result = node.noted(builder.graph.call_module(path, (*head, *tensors)))
    return node.parts(len(loop.empties) + len(states), result)


def _is_recorded() -> bool:
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _stacked(
    parts: list[Tensor], axis: int, empty: tuple[list[int], Any], like: Sequence[Any]
) -> Tensor:
    """Return the results of all rounds beside each other; of no rounds an empty tensor."""
    if parts:
        return torch.stack(parts, axis)
    sizes, dtype = empty
    device = next((x.device for x in like if isinstance(x, Tensor)), None)
    axis = axis % (len(sizes) + 1)
    return torch.empty((*sizes[:axis], 0, *sizes[axis:]), dtype=dtype, device=device)


def _results(body: nn.Module, *values: Any) -> list[Any]:
    returned = body(*values)
    return list(returned) if isinstance(returned, tuple) else [returned]


class Repeated(nn.Module):
    """Calls a body until a count is reached or a condition ends it: the ONNX operator Loop."""

    is_traced_whole = True

    def __init__(
        self,
        body: nn.Module,
        title: str,
        states: int,
        empties: Sequence[tuple[list[int], Any]],
    ) -> None:
        super().__init__()
        self.body, self.title = body, title
        self.states = states
        self.empties = list(empties)

    def forward(
        self, count: Tensor | int | None, condition: Tensor | None, *values: Any
    ) -> tuple[Any, ...]:
        """Return the last states, and what each round gave beside them, stacked."""
        is_computed = isinstance(count, Tensor) or condition is not None
        if is_computed and _is_recorded():
            raise FrontendError(
                f"Loop {self.title!r}: its data say how often it runs, which a trace or an "
                "exported program cannot hold; expected a count that the file fixes. Run the "
                "model itself, or cut the file before the loop"
            )
        states = list(values[: self.states])
        outer = values[self.states :]
        rounds = itertools.count() if count is None else range(int(count))
        collected: list[list[Tensor]] = [[] for _ in self.empties]
        for number in rounds:
            if condition is not None and not bool(condition.reshape(-1)[0]):
                break
            # In a trace ``torch.tensor`` would warn of a constant.
            flag = torch.ones((), dtype=torch.bool) if condition is None else condition
            place = torch.full((), number, dtype=torch.int64)
            following, *results = _results(self.body, place, flag, *states, *outer)
            condition = None if condition is None else following
            states = results[: self.states]
            for parts, part in zip(collected, results[self.states :], strict=True):
                parts.append(part)
        stacked = [
            _stacked(parts, 0, empty, values)
            for parts, empty in zip(collected, self.empties, strict=True)
        ]
        return (*states, *stacked)


class Scanned(nn.Module):
    """Calls a body with one entry after the other of its inputs: the ONNX operator Scan."""

    is_traced_whole = True

    def __init__(
        self,
        body: nn.Module,
        states: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        empties: Sequence[tuple[list[int], Any]],
    ) -> None:
        super().__init__()
        self.body, self.states = body, states
        self.inputs = inputs
        self.outputs = outputs
        self.empties = list(empties)

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Return the last states, and what each round gave beside them, stacked."""
        end = self.states + len(self.inputs)
        states = list(values[: self.states])
        scanned, outer = values[self.states : end], values[end:]
        entries = []
        for x, (axis, backwards) in zip(scanned, self.inputs, strict=True):
            parts = list(torch.unbind(x, axis))
            entries.append(parts[::-1] if backwards else parts)
        collected: list[list[Tensor]] = [[] for _ in self.outputs]
        for row in zip(*entries, strict=True):
            results = _results(self.body, *states, *row, *outer)
            states = results[: self.states]
            for parts, part in zip(collected, results[self.states :], strict=True):
                parts.append(part)
        rows = zip(collected, self.outputs, self.empties, strict=True)
        stacked = [
            _stacked(parts[::-1] if prepended else parts, axis, empty, values)
            for parts, (axis, prepended), empty in rows
        ]
        return (*states, *stacked)
