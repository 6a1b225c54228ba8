"""Runs of a model that start where something changed, from values kept of an earlier run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx, nn

from torchq.errors import GraphError
from torchq.graph import Forward, GraphRunner, call_arguments, call_model, move_to, trace
from torchq.nn import TensorQuantizer

__all__ = ["Runs"]


class Runs:
    """Runs one model on one batch after the other, whole or from some quantizer on.

    Args:
        model: in eval mode.
        forward: the user's own way to run it; then nothing is traced.
        device: where tensors are moved.
        example: the first batch; the model is traced with it.

    Attributes:
        note: why every run is a whole one; empty where runs start in the middle.
    """

    def __init__(
        self, model: nn.Module, forward: Forward | None, device: torch.device | None, example: Any
    ) -> None:
        self.model, self.forward, self.device = model, forward, device
        self.note = ""
        self._runner = None if forward else self._traced(example)
        if forward:
            self.note = "forward= runs the model itself, so that nothing can be reused"
        self._kept: dict[str, Any] = {}
        self._batch: Any = None

    def _traced(self, example: Any) -> GraphRunner | None:
        try:
            found = trace(self.model, self._moved(example))
        except GraphError as error:
            self.note = f"each run is a whole one, as the model cannot be traced ({error})"
            return None
        if found.level != "module":
            self.note = f"each run is a whole one: {found.lost[0]}"
            return None
        return GraphRunner(found.graph_module)

    def _moved(self, batch: Any) -> Any:
        return batch if self.device is None else move_to(batch, self.device)

    def starts(self, groups: Collection[Collection[TensorQuantizer]]) -> list[str | None]:
        """Return for each group the node that runs first of those that it changes.

        It is None where nothing was traced, and empty where the model calls none of them.
        """
        if self._runner is None:
            return [None] * len(groups)
        modules = dict(self._runner.graph_module.named_modules(remove_duplicate=False))
        first: dict[int, tuple[int, str]] = {}
        for position, node in enumerate(self._runner.graph_module.graph.nodes):
            if node.op == "call_module":
                first.setdefault(id(modules[str(node.target)]), (position, node.name))
        found: list[str | None] = []
        for group in groups:
            places = [first[id(q)] for q in group if id(q) in first]
            found.append(min(places)[1] if places else "")
        return found

    def reference(self, batch: Any, starts: Collection[str | None]) -> Any:
        """Run a batch whole, and keep the values that runs from ``starts`` on will need.

        Returns:
            The output of the model.
        """
        self._batch, self._kept = self._moved(batch), {}
        if self._runner is None:
            return self._whole()
        output = _output_name(self._runner)
        needed: dict[str, None] = {}
        for start in starts:
            if start:
                needed.update(dict.fromkeys(self._runner.range_inputs(start, output)))
        args, kwargs = call_arguments(self.model, self._batch)
        values = self._runner.run(_by_name(self._runner, args, kwargs), outputs=[*needed, output])
        self._kept = dict(zip(needed, values, strict=False))
        return values[-1]

    def again(self) -> Any:
        """Run the last batch again, whole."""
        return self._whole()

    def _whole(self) -> Any:
        return call_model(self.model, self._batch, forward=self.forward)

    def from_start(self, start: str | None) -> Any:
        """Run the last batch again, from the node ``start`` on."""
        if self._runner is None or start is None:
            return self._whole()
        output = _output_name(self._runner)
        names = self._runner.range_inputs(start, output)
        feed = {name: self._kept[name] for name in names}
        return self._runner.run_range(start, output, feed)


def _output_name(runner: GraphRunner) -> str:
    return runner.node_names[-1]


def _by_name(runner: GraphRunner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the graph's arguments."""
    nodes: list[fx.Node] = [n for n in runner.graph_module.graph.nodes if n.op == "placeholder"]
    named = {str(node.target): node.name for node in nodes}
    found = {node.name: value for node, value in zip(nodes, args, strict=False)}
    return found | {named[key]: value for key, value in kwargs.items() if key in named}
