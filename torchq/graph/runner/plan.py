"""The plan of a run: which nodes run, when values are freed, and which values must be copied."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx, nn

from torchq.graph.runner.effects import has_effect, may_alias, may_write, writes

__all__ = ["RunPlan", "plan_run"]


@dataclass(frozen=True)
class RunPlan:
    """What a run does, for one choice of inputs and outputs.

    Attributes:
        nodes: those that run, in order; without those that are fed.
        released: node -> the values that nothing reads after it.
        copied: nodes that are fed or asked for, and that a later node may overwrite.
    """

    nodes: tuple[fx.Node, ...]
    released: dict[fx.Node, tuple[fx.Node, ...]]
    copied: frozenset[fx.Node]


def plan_run(
    graph: fx.Graph,
    modules: dict[str, nn.Module],
    fed: Collection[fx.Node],
    requested: Collection[fx.Node],
    *,
    with_effects: bool,
) -> RunPlan:
    """Plan a run that computes ``requested`` from ``fed``.

    Args:
        graph: the whole graph.
        modules: the modules that it calls, by path.
        fed: nodes whose values are given.
        requested: nodes whose values are wanted.
        with_effects: run nodes that write or check even where no wanted value needs them, as the
            model itself does.

    Returns:
        The plan. Nodes run that the wanted values are computed from, and those that overwrite such
        a value before it is read.
    """
    nodes = list(graph.nodes)
    called = {n: modules.get(str(n.target)) for n in nodes if n.op == "call_module"}
    roots = _roots(nodes, called, fed)
    needed = set(requested)
    read: set[fx.Node] = set()
    running: list[fx.Node] = []
    for node in reversed(nodes):
        if node in fed:
            continue
        module = called.get(node)
        written = _written(node, roots) if writes(node, module) else set()
        wanted = node in needed or bool(written & read)
        if wanted or (with_effects and has_effect(node, module)):
            running.append(node)
            needed.update(node.all_input_nodes)
            read.update(_written(node, roots))
    running.reverse()
    copied = _overwritten(running, called, roots, {*fed, *requested})
    return RunPlan(tuple(running), _last_uses(running), frozenset(copied))


def _roots(
    nodes: Sequence[fx.Node], called: dict[fx.Node, nn.Module | None], fed: Collection[fx.Node]
) -> dict[fx.Node, set[fx.Node]]:
    """Return for each node the nodes whose memory its value may lie in."""
    found: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        shares = node not in fed and may_alias(node, called.get(node))
        found[node] = {node}
        if shares and node.all_input_nodes:
            found[node] = _written(node, found)
    return found


def _written(node: fx.Node, roots: dict[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return the roots of everything that ``node`` reads, which it may overwrite."""
    return set().union(*(roots[value] for value in node.all_input_nodes))


def _last_uses(running: Sequence[fx.Node]) -> dict[fx.Node, tuple[fx.Node, ...]]:
    """Return the values that nothing reads after each node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in running:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    released: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        released.setdefault(reader, []).append(value)
    return {reader: tuple(values) for reader, values in released.items()}


def _overwritten(
    running: Sequence[fx.Node],
    called: dict[fx.Node, nn.Module | None],
    roots: dict[fx.Node, set[fx.Node]],
    values: Collection[fx.Node],
) -> set[fx.Node]:
    """Return those of ``values`` that a node may overwrite after they were computed."""
    found: set[fx.Node] = set()
    for node in running:
        if may_write(node, called.get(node)):
            written = _written(node, roots)
            found.update(v for v in values if v is not node and v < node and written & roots[v])
    return found
