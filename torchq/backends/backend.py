"""Backends compute the operations of a graph in place of torch; each is a :class:`NodeCall`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn

from torchq.errors import ConfigError
from torchq.formats import IntFormat
from torchq.graph.operators import (
    ASSIGNING,
    effects_of,
    operator_name,
    operator_named,
    operator_of,
)
from torchq.nn import TensorQuantizer
from torchq.nn.tensor_quantizer import Delegate
from torchq.recipes import PLATFORMS
from torchq.utils import short_repr

# Operators that return codes for codes, one grid before and behind them, beside moves and max.
_KEEPS_GRID = frozenset(["relu", "dropout", "identity", "adaptive_max_pool2d"])


def writes_first_argument(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if a call writes its result into its first argument, as ``relu_`` does."""
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        return getattr(module, "inplace", False) is True
    if node.target in ASSIGNING or _is_underscored(operator_name(node.target).partition(".")[0]):
        return True
    if getattr(node.target, "__module__", None) != "torch.nn.functional":
        return False
    names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    place = names.index("inplace") if "inplace" in names else len(node.args)
    given = node.args[place] if place < len(node.args) else node.kwargs.get("inplace")
    return given is True


def _is_underscored(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def operation_of(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """Return the name of what a node computes, the same for a function, a method and a module.

    Operators of ATen and forms that work in place have the name of the function too.
    """
    if node.op != "call_module":
        name = operator_name(node.target).partition(".")[0]
        plain = name[:-1] if _is_underscored(name) else name
        row = operator_named(name)
        return plain if row is None else row.name
    module = graph_module.get_submodule(str(node.target))
    row = operator_of(module)
    return type(module).__qualname__ if row is None else row.name


@dataclass(frozen=True)
class NodeCall:
    """One call of a graph, for the handlers of a :class:`~torchq.backends.Backend`.

    Attributes:
        graph_module: the graph and its modules.
        node: the node that calls.
        default: computes the value as the next handler does, in the end as torch does, from the
            arguments of the call.
    """

    graph_module: fx.GraphModule
    node: fx.Node
    default: Callable[..., Any]

    @property
    def module(self) -> nn.Module | None:
        """The module that is called, or None for a function or method."""
        if self.node.op != "call_module":
            return None
        return self.graph_module.get_submodule(str(self.node.target))

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument of the node as the graph has it: a node or a constant.

        Args:
            index: its position.
            name: its name, where it is given by keyword.
            default: what it is if it is not given.
        """
        args = self.node.args
        return args[index] if index < len(args) else self.node.kwargs.get(name, default)

    def quantizer_of(self, index: int, name: str = "input") -> TensorQuantizer | None:
        """Return the quantizer whose values an argument holds.

        Operators that keep the grid, such as max pooling, may stand between. None where there is
        no such quantizer, or one that is off, not calibrated, or not of integers.

        Args:
            index: the position of the argument.
            name: its name, where it is given by keyword.
        """
        source = self.argument(index, name)
        while isinstance(source, fx.Node):
            quantizer = self._quantizer(source)
            if quantizer is not None:
                return quantizer if _is_integer_grid(quantizer) else None
            if not self._keeps_grid(source) or not source.args:
                return None
            source = source.args[0]
        return None

    def output_quantizer(self) -> TensorQuantizer | None:
        """Return the quantizer that alone reads the result; None if there is none.

        Several quantizers count as one if they have the same scale and the same codes.
        """
        found: list[TensorQuantizer] = []
        for reader in self._readers(self.node):
            quantizer = None if reader is None else self._quantizer(reader)
            if quantizer is None or not _is_integer_grid(quantizer):
                return None
            found.append(quantizer)
        same = len({_grid(quantizer) for quantizer in found}) == 1
        return found[0] if same and found[0].amax.numel() == 1 else None

    def _readers(self, node: fx.Node) -> Iterator[fx.Node | None]:
        """Yield the nodes that read a value, behind operators that keep the grid."""
        for user in node.users:
            if user.op == "output":
                yield None
            elif self._quantizer(user) is None and self._keeps_grid(user):
                yield from self._readers(user)
            else:
                yield user

    def _quantizer(self, node: fx.Node) -> TensorQuantizer | None:
        if node.op != "call_module":
            return None
        module = self.graph_module.get_submodule(str(node.target))
        return module if isinstance(module, TensorQuantizer) else None

    def _keeps_grid(self, node: fx.Node) -> bool:
        calls = node.op in ("call_function", "call_method", "call_module")
        name = operation_of(node, self.graph_module) if calls else ""
        return name in _KEEPS_GRID or not effects_of(name).isdisjoint(("move", "max"))


def _is_integer_grid(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    plain = quantizer.quantizing and d.fake_quant and quantizer.delegate is None
    return plain and quantizer.calibrated and not d.dynamic and isinstance(d.format, IntFormat)


def _grid(quantizer: TensorQuantizer) -> tuple[object, ...]:
    scale, zero_point = quantizer.calculate_qparams()
    codes = tuple(zero_point.flatten().tolist())
    return tuple(scale.flatten().tolist()), codes, quantizer.descriptor.format


#: ``handler(call, *args, **kwargs) -> value``: computes one call of a graph.
Handler = Callable[..., Any]


class Backend:
    """Computes the operations that it has handlers for, and leaves the others to torch.

    Several handlers of one operation form a chain: the one that was registered last is asked first,
    and its ``call.default`` is the one before it. Nothing is shared between backends, so what is
    registered with one is unknown to all others.

    Args:
        platform: a name of :data:`torchq.recipes.PLATFORMS`, for reports; None is a backend of your
            own. It selects no handlers.

    Raises:
        ConfigError: an unknown platform; the text lists the known ones.

    Example:
        >>> backend = Backend("fpga")
        >>> register_handler(lambda call, x: -call.default(x), "relu", backend)
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> runner = torchq.graph.GraphRunner(torch.fx.symbolic_trace(model))
        >>> runner.run(torch.ones(2), backend=backend)
        tensor([-1., -1.])
    """

    def __init__(self, platform: str | None = None) -> None:
        if platform is not None and platform not in PLATFORMS:
            raise ConfigError(
                f"backend: got platform {short_repr(platform)}; "
                f"expected one of {', '.join(PLATFORMS)}"
            )
        self.platform = platform
        self._handlers: dict[str, tuple[Handler, ...]] = {}

    def register(self, operation: str, handler: Handler) -> Backend:
        """Put ``handler`` before the others of ``operation``, and return this backend.

        Args:
            operation: what functions, methods and modules are called: ``"leaky_relu"`` is
                ``torch.nn.functional.leaky_relu`` and ``torch.nn.LeakyReLU``, and ``"add"`` is
                ``x + y``, ``x += y`` and ``torch.ops.aten.add``.
            handler: see :data:`Handler`. It must not change its arguments in place.

        Raises:
            ConfigError: the name is no text, or the handler no function.
        """
        if not isinstance(operation, str) or not operation:
            raise ConfigError(
                f"register_handler: got the operation {short_repr(operation)}; expected its name, "
                "such as 'leaky_relu'"
            )
        if not callable(handler):
            raise ConfigError(
                f"register_handler: got the handler {short_repr(handler)} for {operation!r}; "
                "expected a function handler(call, *args, **kwargs)"
            )
        self._handlers[operation] = (*self.handlers(operation), handler)
        return self

    def over(self, other: Backend) -> Backend:
        """Return a new backend with the handlers of both, these before those of ``other``."""
        joined = Backend(self.platform)
        for source in (other, self):
            for operation in source.operations:
                for handler in source.handlers(operation):
                    joined.register(operation, handler)
        return joined

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations that have a handler."""
        return tuple(self._handlers)

    def handlers(self, operation: str) -> tuple[Handler, ...]:
        """Return the handlers of an operation, the last one asked first."""
        return self._handlers.get(operation, ())

    def call(
        self,
        graph_module: fx.GraphModule,
        node: fx.Node,
        default: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the value of a node; see :meth:`torchq.graph.NodeBackend.call`.

        What an operation computes in place, its handlers compute on a copy, and it is written then.
        """
        handlers, function = self.handlers(operation_of(node, graph_module)), default
        for handler in handlers:
            function = partial(handler, NodeCall(graph_module, node, function))
        written = args[0] if args and handlers else None
        if isinstance(written, Tensor) and writes_first_argument(node, graph_module):
            return written.copy_(function(written.clone(), *args[1:], **kwargs))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        name = "" if self.platform is None else f"{self.platform}: "
        return f"Backend({name}{', '.join(self._handlers) or 'no handlers'})"


def register_handler(handler: Handler, operation: str, platform: Backend) -> None:
    """Let a backend compute an operation by a function of your own.

    Args:
        handler: ``handler(call, *args, **kwargs) -> value``. ``call`` is a
            :class:`torchq.backends.NodeCall`; ``call.default(*args, **kwargs)`` is what would be
            computed without the handler.
        operation: the name of the operation, such as ``"leaky_relu"``.
        platform: the backend, such as ``Backend("fpga")``. A name alone would have to change all
            users of a platform, so it is refused.

    Raises:
        ConfigError: an argument of the wrong type.
    """
    if not isinstance(platform, Backend):
        raise ConfigError(
            f"register_handler: got the platform {short_repr(platform)}; expected a Backend. "
            "Make one with torchq.backends.Backend(name), and pass it to GraphRunner.run"
        )
    platform.register(operation, handler)


def register_delegate(quantizer: TensorQuantizer, function: Delegate | None) -> None:
    """Let a function compute what a quantizer computes.

    Args:
        quantizer: the quantizer.
        function: ``function(x, quantizer) -> Tensor``, called while the quantizer quantizes; None
            gives the quantizer its own function back.

    Raises:
        ConfigError: an argument of the wrong type.
    """
    if not isinstance(quantizer, TensorQuantizer):
        raise ConfigError(
            f"register_delegate: got {short_repr(quantizer)}; expected a TensorQuantizer. "
            "torchq.workflow.quantizers(model) lists those of a model"
        )
    quantizer.delegate = function
