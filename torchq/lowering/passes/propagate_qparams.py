"""The last scale of a rewrite: what depends on the whole result."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from torchq.lowering.graph import match
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.lookup_table import LookupTable
from torchq.lowering.modules.pooling import CodesAvgPool2d, CodesMaxPool2d
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.passes.insert_qdq import Separator
from torchq.lowering.qparams import QParams

__all__ = ["Settler"]

#: Their results are new tensors, which share memory with no other.
_FRESH = (Int8Layer, Quantize, Dequantize, LookupTable, CodesMaxPool2d, CodesAvgPool2d)


class Settler(Separator):
    """Settles qparams and memory once chains are joined.

    Attributes:
        tables: of each table its function and the qparams it was made for.
    """

    tables: dict[fx.Node, tuple[Callable[[Tensor], Tensor], QParams, QParams]]

    def settle(self) -> None:
        """Tell readers of codes which qparams they are on, as clamps have moved zeros, and drop what is unused."""
        self.measure_codes()
        qparams: dict[fx.Node, QParams] = {}
        for node in self.graph.nodes:
            module, source = self.module(node), node.args[0] if node.args else None
            if isinstance(module, Int8Layer):
                if source in qparams:
                    self.own(node).input_qparams = qparams[source]
                if (
                    isinstance(residual := node.args[1] if len(node.args) > 1 else None, fx.Node)
                    and residual in qparams
                ):
                    self.own(node).residual_qparams = qparams[residual]
                if (out := self.own(node).output_qparams) is not None:
                    qparams[node] = out
            elif isinstance(module, Quantize):
                qparams[node] = module.qparams
                module.channels_last = any(
                    isinstance(self.layer(user), Int8Conv) for user in node.users
                )
            elif isinstance(module, LookupTable):
                function, before, qparams[node] = self.tables[node]
                module.table = LookupTable(
                    function, qparams.get(source, before), qparams[node], self.dtype
                ).table  # type: ignore[arg-type]
            elif isinstance(module, Dequantize) and source in qparams:
                module.qparams = qparams[source]
            elif isinstance(module, CodesAvgPool2d):
                qparams[node] = module.propagate_qparams([qparams.get(source)])  # type: ignore[arg-type, assignment]
            elif (parts := match.concatenated(node)) and parts[0] in qparams:
                qparams[node] = qparams[parts[0]]
            elif self.codes_pass(node) and source in qparams:
                qparams[node] = qparams[source]
        self.prune()
        self._reuse_residuals()
        self.graph.lint()
        self.root.recompile()
        self.root.delete_all_unused_submodules()

    def _reuse_residuals(self) -> None:
        """Let a sum take the place of its residual in memory where nothing else can see that: its last reader, and no view of it."""
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        for node in self.graph.nodes:
            residual = (
                node.args[1]
                if isinstance(self.module(node), Int8Conv) and len(node.args) > 1
                else None
            )
            if (
                isinstance(residual, fx.Node)
                and residual is not node.args[0]
                and isinstance(self.module(residual), _FRESH)
            ):
                readers = [user for user in residual.users if user is not node]
                if all(
                    isinstance(self.module(user), _FRESH) and order[user] < order[node]
                    for user in readers
                ):
                    self.layer(node).overwrites_residual = True  # type: ignore[union-attr]

    def codes_pass(self, node: fx.Node) -> bool:
        """Whether the result of a node for codes is the codes of its result for values."""
        return match.moved(node, self.modules) is not None or isinstance(
            self.module(node), CodesMaxPool2d
        )
