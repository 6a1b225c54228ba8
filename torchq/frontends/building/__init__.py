"""What the readers of all formats share: the graph under construction, and one node of a file."""

from torchq.frontends.building.graph import (
    MAX_FOLDED,
    Constant,
    FileNode,
    GraphBuilder,
    Ints,
    Value,
    entering,
    free_path,
    identifier,
    parent_of,
    stack_ints,
)

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
