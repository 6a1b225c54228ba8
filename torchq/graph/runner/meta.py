"""The size and the cost of what each node of a graph computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torchq.graph.calling import tensors_in

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

__all__ = ["MetaRecorder", "NodeMeta"]


@dataclass(frozen=True)
class NodeMeta:
    """What one node computed for an example.

    Attributes:
        path: the module that the node is part of; empty for the model itself.
        shape: of the value, if it is a tensor; of its first tensor, if it holds several.
        dtype: of the same tensor.
        bytes: of all tensors in the value. Views count like copies.
        operations: additions and multiplications of products of matrices and convolutions, as
            ``torch.utils.flop_counter`` counts them: two per element of a product. Operators on
            single elements count 0.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    bytes: int
    operations: int


class MetaRecorder:
    """The hooks that note the figures of each node.

    Args:
        counter: active while the graph runs.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self.found: dict[str, NodeMeta] = {}
        self._counter = counter
        self._before = 0

    def pre(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the operations before a node runs."""
        self._before = self._counter.get_total_flops()

    def post(self, node: fx.Node, path: str, value: Any) -> None:
        """Note what a node returned, and the operations since :meth:`pre`."""
        tensors = list(tensors_in(value))
        runs = node.op.startswith("call")
        self.found[node.name] = NodeMeta(
            path=path,
            shape=tuple(tensors[0].shape) if tensors else None,
            dtype=tensors[0].dtype if tensors else None,
            bytes=sum(t.numel() * t.element_size() for t in tensors),
            operations=self._counter.get_total_flops() - self._before if runs else 0,
        )
