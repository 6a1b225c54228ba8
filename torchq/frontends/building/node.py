"""One node of a file as converters see it, whatever the format of the file."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, fx, nn

from torchq.errors import FrontendError
from torchq.frontends.building.builder import GraphBuilder
from torchq.frontends.building.values import Constant, Ints, Value, stack_ints

#: The largest constant, in elements, that is computed while a file is converted.
MAX_FOLDED = 2**26


class FileNode:
    """One node: its inputs, its attributes, and the calls that a converter writes in its place.

    Args:
        builder: what collects the graph.
        op_type: the operator.
        name: of the node in the file, for errors and for the names of modules.
        attributes: by name.
        inputs: None for one that is left out.

    Attributes:
        format: nodes of the graph have the name and the operator of the file's node in
            ``meta["<format>_name"]`` and ``meta["<format>_op"]``.
    """

    format: ClassVar[str] = "file"

    def __init__(
        self,
        builder: GraphBuilder,
        op_type: str,
        name: str,
        attributes: dict[str, Any],
        inputs: list[Value],
    ) -> None:
        self.builder = builder
        self.op_type, self.name = op_type, name
        self.attributes, self.inputs = attributes, inputs

    def attr(self, name: str, default: Any = None) -> Any:
        """Return an attribute, or ``default`` where the file does not give it."""
        return self.attributes.get(name, default)

    def required(self, name: str) -> Any:
        """Return an attribute that the format requires.

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
        return self._parts(count, self.call(function, *args))

    def module_parts(self, count: int, module: nn.Module, *args: Value) -> list[Value]:
        """Call a module that returns one tensor, or a tuple of ``count`` tensors."""
        result = self.module(module, *args)
        return [result] if count == 1 else self._parts(count, result)

    def _parts(self, count: int, result: Any) -> list[Value]:
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
        """Return a node that gives ``value``: constants become tensors of the result."""
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, Constant):
            return self.builder.stored(value)
        assert isinstance(value, Ints)
        arguments: tuple[Any, ...] = (list(value.items), value.scalar)
        if value.dtype is not torch.int64:
            arguments = (*arguments, value.dtype)
        node = self.builder.graph.call_function(stack_ints, arguments)
        return self._noted(node, stack_ints)

    def _noted(self, node: fx.Node, function: object) -> fx.Node:
        node.meta[f"{self.format}_name"] = self.name
        node.meta[f"{self.format}_op"] = self.op_type
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
