"""What passes may know of the export beside the graph: the lengths of the example."""

from __future__ import annotations

from collections.abc import Mapping

from torchq.onnx.ir import Model

__all__ = ["lengths_of_example", "note_lengths"]

_LENGTHS = "torchq.example"  # Key in the ``meta`` of a graph, which no file has.


def note_lengths(model: Model, lengths: Mapping[str, tuple[int, ...]]) -> None:
    """Note the shape of each input in the example, also where the file leaves lengths open.

    Passes choose by it what is fastest; what they write is right for all lengths.
    """
    model.graph.meta[_LENGTHS] = dict(lengths)


def lengths_of_example(model: Model) -> dict[str, tuple[int, ...]]:
    """Return what :func:`note_lengths` noted; nothing for graphs that come from files."""
    return dict(model.graph.meta.get(_LENGTHS, {}))
