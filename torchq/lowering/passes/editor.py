"""The editor that passes use: calls of modules are looked up, inserted, replaced and erased."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn
from torch.fx.node import Argument

from torchq.graph import operator_name
from torchq.lowering.layer import Int8Layer
from torchq.lowering.passes import match
from torchq.lowering.qparams import ByteQParams
from torchq.utils import set_submodule


class GraphEditor:
    """A traced model that passes change in place.

    Attributes:
        root: the traced model.
        graph: its graph.
        modules: the modules that its nodes call, by name.
        qparams: for nodes whose result is codes, how these codes are to be read, as far as
            :func:`~torchq.lowering.passes.fuse.propagate_qparams` has come.
    """

    def __init__(self, graph_module: fx.GraphModule, dtype: torch.dtype) -> None:
        self.root, self.graph, self.dtype = graph_module, graph_module.graph, dtype
        self.modules: dict[str, nn.Module] = dict(
            graph_module.named_modules(remove_duplicate=False)
        )
        self.qparams: dict[fx.Node, ByteQParams] = {}
        self._own_layers()

    def _own_layers(self) -> None:
        """Give each call of an integer layer a variant on the same tensors, free to be changed."""
        called = set()
        for node in list(self.graph.nodes):
            if layer := self.layer(node):
                name = str(node.target)
                if name not in called:
                    called.add(name)
                    self.modules[name] = variant = layer.variant()
                    set_submodule(self.root, name, variant)
                else:
                    new = self.insert_before(node, "again", layer.variant())
                    node.target = new.target
                    self.graph.erase_node(new)

    def module(self, node: object) -> nn.Module | None:
        """Return the module that ``node`` calls; see :func:`match.module_of`."""
        return match.module_of(node, self.modules)

    def layer(self, node: object) -> Int8Layer | None:
        """Return the integer layer that ``node`` calls."""
        found = self.module(node)
        return found if isinstance(found, Int8Layer) else None

    def insert_before(
        self, node: fx.Node, suffix: str, module: nn.Module, *args: Argument
    ) -> fx.Node:
        """Insert a call of a new module just before ``node``."""
        base = str(node.target) if node.op == "call_module" else node.name
        name, count = f"{base}_{suffix}", 1
        while name in self.modules:
            name, count = f"{base}_{suffix}_{count}", count + 1
        self.root.add_submodule(name, module.eval())
        self.modules[name] = module
        with self.graph.inserting_before(node):
            return self.graph.call_module(name, args)

    def replace(self, node: fx.Node, suffix: str, module: nn.Module, *args: Argument) -> fx.Node:
        """Replace ``node`` by a call of ``module`` on ``args``."""
        new = self.insert_before(node, suffix, module, *args)
        self.bypass(node, new)
        return new

    def bypass(self, node: fx.Node, source: fx.Node) -> None:
        """Let every reader of ``node`` read ``source`` instead, and erase ``node``."""
        node.replace_all_uses_with(source)
        self.graph.erase_node(node)

    def prune(self) -> None:
        """Erase what nothing reads, except checks of arguments.

        ``fx.Graph.eliminate_dead_code`` also checks the whole graph each time, which takes long
        in deep models.
        """
        for node in reversed(self.graph.nodes):
            # ``is_impure`` does not know the function that refuses arguments which are not None.
            checks = operator_name(node.target) == "_assert_is_none"
            if not (node.users or checks or node.is_impure()):
                self.graph.erase_node(node)


def apply_pass(editor: GraphEditor, rewrite: NodePass) -> bool:
    """Apply one pass to every node that is there now; return whether it changed anything."""
    changed, present = False, set(editor.graph.nodes)
    for node in list(editor.graph.nodes):
        if node in present and rewrite(editor, node):
            editor.prune()
            changed, present = True, set(editor.graph.nodes)
    return changed


#: A pass; see :mod:`torchq.lowering.passes`.
NodePass = Callable[[GraphEditor, fx.Node], bool]
