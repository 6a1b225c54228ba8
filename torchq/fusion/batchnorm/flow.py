"""The flow of data in a model: from torch.fx, from a recorded run, or from the parts that trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from torchq.fusion.modules import is_fuse_leaf
from torchq.graph import Call, Flow, flow_of_graph, record, trace_modules

__all__ = ["find_flow"]


def find_flow(model: nn.Module, example: Any) -> tuple[Flow, tuple[str, ...]]:
    """Return how data flows in ``model``, and remarks for the report.

    Where torch.fx can trace the model, its trace is the flow, and the dimensions of results come
    from the example. Else the flow is recorded on the example. Without an example it is that of
    the parts which torch.fx can trace.

    Args:
        model: left unchanged.
        example: one input, or None.
    """
    recorded = None if example is None else record(model, copy.deepcopy(example), is_fuse_leaf)
    try:
        flow = flow_of_graph(trace_modules(model, is_fuse_leaf), model)
    except Exception as error:  # a model may fail to trace in any way it likes
        first_line = str(error).partition("\n")[0]
        failure = f"not traceable with torch.fx ({type(error).__name__}: {first_line})"
        if recorded is not None:
            return recorded, (f"{failure}; recorded one forward pass instead",)
        note = f"{failure}; traced its parts. Give an example to see the whole"
        return _flow_of_parts(model), (note,)
    return (flow if recorded is None else _with_ndims(flow, recorded)), ()


def _with_ndims(flow: Flow, recorded: Flow) -> Flow:
    """Return ``flow`` with the dimensions of module results that the recorded run saw."""

    def with_ndim(call: Call) -> Call:
        seen = set()
        if call.module is not None:
            seen = {known.ndim for known in recorded.calls_of(call.module)}
        return replace(call, ndim=seen.pop() if len(seen) == 1 else None)

    return replace(flow, calls=tuple(map(with_ndim, flow.calls)))


def _flow_of_parts(model: nn.Module) -> Flow:
    """Return the flows of the parts that torch.fx can trace, one behind the other."""
    calls: list[Call] = []
    outputs: set[int] = set()
    read: set[int] = set()
    for prefix, flow in _traceable_parts(model, ""):
        start = len(calls)
        for call in flow.calls:
            inputs = tuple(start + index for index in call.inputs)
            index, name = start + call.index, prefix + call.name
            calls.append(replace(call, index=index, name=name, inputs=inputs))
        outputs.update(start + index for index in flow.outputs)
        read |= flow.read
    return Flow(tuple(calls), frozenset(outputs), "fx", frozenset(read))


def _traceable_parts(module: nn.Module, prefix: str) -> Iterator[tuple[str, Flow]]:
    """Yield path prefix and flow of the outermost parts that torch.fx can trace."""
    for name, child in module.named_children():
        path = f"{prefix}{name}."
        if is_fuse_leaf(child):
            continue
        try:
            flow = flow_of_graph(trace_modules(child, is_fuse_leaf), child)
        except Exception:  # look inside instead
            yield from _traceable_parts(child, path)
        else:
            yield path, flow
