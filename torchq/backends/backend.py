"""Backends: what computes the operations of a graph in place of torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, fx

from torchq.backends.call import Call, operation_of, writes_first_argument
from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer
from torchq.nn.tensor_quantizer import Delegate
from torchq.recipes import PLATFORMS
from torchq.utils import short_repr

__all__ = ["Backend", "Handler", "register_delegate", "register_handler"]

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
            function = partial(handler, Call(graph_module, node, function))
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
            :class:`torchq.backends.Call`; ``call.default(*args, **kwargs)`` is what would be
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
