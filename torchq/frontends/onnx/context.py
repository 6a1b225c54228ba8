"""One node of an ONNX file as converters see it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from torchq.errors import FrontendError
from torchq.frontends.onnx.builder import GraphBuilder
from torchq.frontends.onnx.values import Constant, Ints, Value

__all__ = ["MAX_FOLDED", "NodeContext", "stack_ints"]

#: The largest constant, in elements, that is computed while a file is converted.
MAX_FOLDED = 2**26


def stack_ints(items: Sequence[int], scalar: bool) -> Tensor:
    """Return sizes as the int64 tensor that ONNX means.

    A vector, or a number without dimensions.
    """
    return torch.tensor(items[0] if scalar else list(items), dtype=torch.int64)


class NodeContext:
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
        self.builder = builder
        self.op_type, self.name, self.version = op_type, name, version
        self.attributes, self.inputs = attributes, inputs
        self.input_names, self.output_names = input_names, output_names

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or ``default`` where the file does not give it."""
        return self.attributes.get(name, default)

    def required(self, name: str) -> Any:
        """Return an attribute that the standard requires.

        Raises:
            FrontendError: the file does not give it.
        """
        if name not in self.attributes:
            self.refuse(f"the attribute {name!r} is missing")
        return self.attributes[name]

    def input(self, index: int) -> Value:
        """Return an input, None where it is left out."""
        return self.inputs[index] if index < len(self.inputs) else None

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that this node cannot be converted."""
        raise FrontendError(f"{self.builder.where}: {self.op_type} {self.name!r}: {reason}")

    # What is known of the inputs.

    def constant(self, index: int) -> Tensor | None:
        """Return an input that is known now, else None."""
        value = self.input(index)
        return value.tensor if isinstance(value, Constant) else None

    def known(self, index: int, what: str) -> Tensor:
        """Return an input that must be known now.

        Raises:
            FrontendError: the input is computed by the network.
        """
        tensor = self.constant(index)
        if tensor is None:
            self.refuse(f"its {what} is computed by the network; expected a constant")
        return tensor

    def ints(self, index: int) -> list[int | fx.Node] | None:
        """Return the elements of an input of sizes: numbers and nodes.

        None for a tensor that the network computes.
        """
        value = self.input(index)
        if isinstance(value, Constant):
            integers = not value.tensor.is_floating_point() and value.tensor.dtype is not torch.bool
            return value.tensor.reshape(-1).tolist() if integers else None
        return list(value.items) if isinstance(value, Ints) else None

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
            return torch.int64
        return self.builder.dtypes.get(self.input_names[index])

    def floating(self, index: int) -> bool:
        """Return True if an input is known to hold floating-point numbers."""
        dtype = self.dtype(index)
        return dtype is not None and dtype.is_floating_point

    # What converters write.

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        """Call ``function`` in the forward of the result; at once where all arguments are known.

        Args:
            function: takes tensors for :class:`Constant` and :class:`Ints`; must be importable by
                its name.
            *args: values, numbers, strings and lists of these.
            **kwargs: likewise.
        """
        if not self._has_nodes((args, kwargs)):
            return self._folded(function, args, kwargs)
        args, kwargs = self._as_arguments(args), self._as_arguments(kwargs)
        node = self.builder.graph.call_function(function, tuple(args), dict(kwargs))
        return self._noted(node, function)

    def call_parts(self, count: int, function: Callable[..., Any], *args: Any) -> list[Value]:
        """Call a function that returns ``count`` tensors."""
        result: Any = self.call(function, *args)
        if isinstance(result, fx.Node):
            return [self.call(operator.getitem, result, index) for index in range(count)]
        return list(result)  # a tuple of constants

    def module(self, module: nn.Module, *args: Value, name: str | None = None) -> Value:
        """Call a module of the result; at once where all arguments are known.

        Args:
            module: put into the result in eval mode.
            args: its arguments.
            name: where to put it, by default the name of this node.
        """
        module.eval()
        if not self._has_nodes(args):
            return self._folded(module, args, {})
        path = self.builder.add_module(name or self.name, module, self.op_type)
        node = self.builder.graph.call_module(path, tuple(self._as_arguments(args)))
        return self._noted(node, module)

    def tensor(self, value: Value) -> fx.Node:
        """Return a node that gives ``value``: constants become buffers of the result."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, Constant):
            return self.builder.buffer(value)
        assert isinstance(value, Ints)
        node = self.builder.graph.call_function(stack_ints, (list(value.items), value.scalar))
        return self._noted(node, stack_ints)

    def sizes(self, items: Sequence[int | fx.Node], scalar: bool = False) -> Value:
        """Return int64 numbers as a value: a constant where all are known."""
        if all(isinstance(item, int) for item in items):
            return Constant(stack_ints(items, scalar))  # type: ignore[arg-type]
        return Ints(tuple(items), scalar)

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

    def _noted(self, node: fx.Node, function: object) -> fx.Node:
        node.meta["onnx_name"], node.meta["onnx_op"] = self.name, self.op_type
        if getattr(function, "__module__", "").startswith("torchq."):
            # torch.fx keeps the call whole when it traces the result again.
            node.meta["is_wrapped"] = True
        return node

    def _folded(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Value:
        with torch.no_grad():
            result = function(*_as_tensors(args), **_as_tensors(kwargs))
        if isinstance(result, (tuple, list)):
            return tuple(Constant(part) for part in result)  # type: ignore[return-value]
        if result.numel() > MAX_FOLDED and math.prod(result.stride() or (1,)):
            self.refuse(
                f"it makes a constant of {tuple(result.shape)}; "
                f"expected one of at most {MAX_FOLDED} elements"
            )
        return Constant(result)

    def _has_nodes(self, value: Any) -> bool:
        if isinstance(value, (fx.Node, Ints)):
            return True
        if isinstance(value, dict):
            return any(map(self._has_nodes, value.values()))
        return isinstance(value, (tuple, list)) and any(map(self._has_nodes, value))

    def _as_arguments(self, value: Any) -> Any:
        if isinstance(value, (Constant, Ints)):
            return self.tensor(value)
        if isinstance(value, dict):
            return {key: self._as_arguments(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(self._as_arguments(item) for item in value)
        return value


def _as_tensors(value: Any) -> Any:
    """Replace constants by their tensors, in nested arguments."""
    if isinstance(value, Constant):
        return value.tensor
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_as_tensors(item) for item in value)
    return value
