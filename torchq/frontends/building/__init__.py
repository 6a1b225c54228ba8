"""What the readers of all formats share: the graph under construction, and one node of a file."""

from torchq.frontends.building.builder import GraphBuilder
from torchq.frontends.building.node import MAX_FOLDED, FileNode
from torchq.frontends.building.paths import free_path, identifier, parent_of
from torchq.frontends.building.registry import entering
from torchq.frontends.building.values import Constant, Ints, Value, stack_ints

__all__ = [
    "MAX_FOLDED",
    "Constant",
    "FileNode",
    "GraphBuilder",
    "Ints",
    "Value",
    "entering",
    "free_path",
    "identifier",
    "parent_of",
    "stack_ints",
]
