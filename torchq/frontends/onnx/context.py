"""One node of an ONNX file as converters see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchq.frontends.building import Constant, FileNode, Ints, Value, stack_ints
from torchq.frontends.onnx.builder import GraphBuilder


class NodeContext(FileNode):
    """One node: its inputs, its attributes, and the calls that a converter writes in its place.

    Args:
        builder: what collects the graph.
        op_type: the operator.
        name: of the node in the file, for errors and for the names of modules.
        version: the opset version of the operator's domain.
        attributes: numbers, strings, tensors and lists of these, by name.
        inputs: None for one that is left out.
        input_names, output_names: in the file.
    """

    format = "onnx"
    builder: GraphBuilder

    def __init__(
        self,
        builder: GraphBuilder,
        op_type: str,
        name: str,
        version: int,
        attributes: dict[str, Any],
        inputs: list[Value],
        input_names: Sequence[str],
        output_names: Sequence[str],
    ) -> None:
        super().__init__(builder, op_type, name, attributes, inputs)
        self.version = version
        self.input_names, self.output_names = input_names, output_names

    def ints(self, index: int) -> list[int | fx.Node] | None:
        """Return the elements of an input of sizes: numbers and nodes.

        None for a tensor that the network computes, and for flags and floating-point numbers.
        """
        value = self.input(index)
        if isinstance(value, Constant):
            integers = not value.tensor.is_floating_point() and value.tensor.dtype is not torch.bool
            return value.tensor.reshape(-1).tolist() if integers else None
        known = isinstance(value, Ints) and value.dtype in (torch.int64, torch.int32)
        return list(value.items) if known else None  # type: ignore[union-attr]

    def known_ints(self, index: int, what: str) -> list[int]:
        """Return the elements of an input that must be known now.

        Raises:
            FrontendError: the input is computed by the network.
        """
        return [int(item) for item in self.known(index, what).reshape(-1).tolist()]

    def axes(self, index: int = 1) -> list[int] | None:
        """Return axes: an attribute in old versions of an operator, an input in newer ones.

        None where they are left out.
        """
        if "axes" in self.attributes:
            return list(self.attributes["axes"])
        return None if self.input(index) is None else self.known_ints(index, "axes")

    def shape(self, index: int) -> list[int | None] | None:
        """Return the shape of an input: None for a size, or for all of it, that is not known."""
        value = self.input(index)
        if isinstance(value, Constant):
            return list(value.tensor.shape)
        if isinstance(value, Ints):
            return [] if value.scalar else [len(value.items)]
        return self.builder.shapes.get(self.input_names[index])

    def ndim(self, index: int) -> int:
        """Return the number of dimensions of an input.

        Raises:
            FrontendError: the number is not known.
        """
        shape = self.shape(index)
        if shape is None:
            self.refuse(f"the number of dimensions of {self.input_names[index]!r} is not known")
        return len(shape)

    def dtype(self, index: int) -> torch.dtype | None:
        """Return the element type of an input, None if it is not known."""
        value = self.input(index)
        if isinstance(value, Constant):
            return value.tensor.dtype
        if isinstance(value, Ints):
            return value.dtype
        return self.builder.dtypes.get(self.input_names[index])

    def floating(self, index: int) -> bool:
        """Return True if an input is known to hold floating-point numbers."""
        dtype = self.dtype(index)
        return dtype is not None and dtype.is_floating_point

    def sizes(
        self,
        items: Sequence[int | fx.Node],
        scalar: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Value:
        """Return integers as a value: a constant where all are known.

        Args:
            items: the numbers.
            scalar: see :class:`Ints`.
            dtype: see :class:`Ints`; by default that of the first sizes among the inputs.
        """
        if dtype is None:
            given = (value.dtype for value in self.inputs if isinstance(value, Ints))
            dtype = next(given, torch.int64)
        if all(isinstance(item, int) for item in items):
            return Constant(stack_ints(items, scalar, dtype))  # type: ignore[arg-type]
        return Ints(tuple(items), scalar, dtype)

    def arithmetic(self, function: Callable[..., Any], *args: int | fx.Node) -> int | fx.Node:
        """Compute one number from numbers, at once where all are known."""
        if all(isinstance(item, int) for item in args):
            return int(function(*args))
        return self._noted(self.builder.graph.call_function(function, args), function)

    def size(self, index: int, axis: int) -> int | fx.Node:
        """Return one size of an input: a number where the file fixes it."""
        shape = self.shape(index)
        if shape is not None and shape[axis] is not None:
            return int(shape[axis])  # type: ignore[arg-type]
        source = self.tensor(self.inputs[index])
        return self.builder.graph.call_method("size", (source, axis))
