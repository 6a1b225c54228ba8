"""Editing a traced model: new calls of new modules, under free names."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchq.lowering.graph import match
from torchq.lowering.graph.traced_module import Absent
from torchq.lowering.modules.base import Int8Layer

__all__ = ["Editor", "base_name"]


class Editor:
    """A traced model that is being changed, in place.

    Args:
        graph_module: traced with integer layers, quantizers and torch's layers as single calls.
        dtype: of floating-point tensors in it.
    """

    def __init__(self, graph_module: fx.GraphModule, dtype: torch.dtype) -> None:
        self.root, self.graph, self.dtype = graph_module, graph_module.graph, dtype
        self.modules: dict[str, nn.Module] = dict(
            graph_module.named_modules(remove_duplicate=False)
        )

    def module(self, node: object) -> nn.Module | None:
        """The module that a node calls."""
        return match.module_of(node, self.modules)

    def layer(self, node: object) -> Int8Layer | None:
        """The integer layer that a node calls."""
        found = self.module(node)
        return found if isinstance(found, Int8Layer) else None

    def call(self, base: str, module: nn.Module, *args: fx.Node) -> fx.Node:
        """A new call of a new module at the insertion point, under a name made from ``base``."""
        name, count = base, 1
        while name in self.modules:
            name, count = f"{base}_{count}", count + 1
        self.root.add_submodule(name, module.eval())
        self.modules[name] = module
        return self.graph.call_module(name, args)

    def replace(self, node: fx.Node, module: nn.Module, suffix: str, *args: fx.Node) -> fx.Node:
        """Call ``module`` on ``args`` in the place of ``node``."""
        with self.graph.inserting_before(node):
            new = self.call(f"{base_name(node)}_{suffix}", module, *args)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        return new

    def prune(self) -> None:
        """Erase what nothing reads: ``eliminate_dead_code`` without its checks of the whole graph, which take long in deep ones.

        Checks that arguments have the values which the graph was traced for stay.
        """
        for node in reversed(self.graph.nodes):
            kept = (
                node.users
                or node.op in ("placeholder", "output")
                or node.is_impure()
                or isinstance(self.module(node), Absent)
            )
            if not kept:
                self.graph.erase_node(node)

    def own(self, node: fx.Node) -> Int8Layer:
        """The layer of ``node``, free to be changed: nothing else calls it."""
        layer = self.layer(node)
        assert layer is not None
        if sum(
            other.target == node.target for other in self.graph.nodes if other.op == "call_module"
        ) > 1 or self._aliased(layer):
            layer = layer.variant()
            with self.graph.inserting_before(node):
                new = self.call(f"{node.target}_again", layer)
            node.target = new.target
            self.graph.erase_node(new)
        return layer

    def _aliased(self, layer: Int8Layer) -> bool:
        used = {node.target for node in self.graph.nodes if node.op == "call_module"}
        return sum(module is layer for name, module in self.modules.items() if name in used) > 1

    def before(self, node: fx.Node, module: nn.Module, source: fx.Node) -> fx.Node:
        """Call ``module`` on ``source`` just before ``node``."""
        with self.graph.inserting_before(node):
            return self.call(f"{base_name(node)}_input", module, source)


def base_name(node: fx.Node) -> str:
    """What new nodes in place of this one are named after."""
    return str(node.target) if node.op == "call_module" else node.name
