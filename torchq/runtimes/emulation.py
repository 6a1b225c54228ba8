"""What a chip computes, bit for bit, on the graph of a quantized model.

A :class:`Backend` has handlers for operations, which see each one as a :class:`NodeCall`, and
:class:`torchq.graph.GraphRunner` runs a traced model with it. Three come with torchq:
:func:`shift_leaky_relu`, :func:`integer_average_pooling` and :func:`fixed_point`. A chip multiplies
by an integer and shifts, in place of a floating-point scale; all that is exact in int64.
"""

from __future__ import annotations

import difflib
import inspect
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from torchq.errors import ConfigError, QuantizationError
from torchq.formats import IntFormat, round_
from torchq.graph.operators import (
    OPERATORS,
    effects_of,
    operator_name,
    operator_named,
    operator_of,
    writes,
)
from torchq.nn import TensorQuantizer
from torchq.utils import short_repr

__all__ = [
    "Backend",
    "Handler",
    "NodeCall",
    "fixed_point",
    "integer_average_pooling",
    "multiply",
    "operation_of",
    "quantize_multiplier",
    "shift_leaky_relu",
    "writes_first_argument",
]

# Operators that return codes for codes, one grid before and behind them, beside moves and max.
_KEEPS_GRID = frozenset(["relu", "dropout", "identity", "adaptive_max_pool2d"])


def writes_first_argument(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if a call writes its result into its first argument, as ``relu_`` does."""
    is_module = node.op == "call_module"
    if writes(
        node, graph_module.get_submodule(str(node.target)) if is_module else None
    ):
        return True
    if getattr(node.target, "__module__", None) != "torch.nn.functional":
        return False
    names = list(inspect.signature(node.target).parameters)  # type: ignore[arg-type]
    place = names.index("inplace") if "inplace" in names else len(node.args)
    inplace = node.args[place] if place < len(node.args) else node.kwargs.get("inplace")
    return inplace is True


def operation_of(node: fx.Node, graph_module: fx.GraphModule) -> str:
    """Return the name of what a node computes, the same for a function, a method and a module.

    Operators of ATen and forms that work in place have the name of the function too.
    """
    if node.op != "call_module":
        name = operator_name(node.target).partition(".")[0]
        row = operator_named(name)
        return name.rstrip("_") if row is None else row.name
    module = graph_module.get_submodule(str(node.target))
    row = operator_of(module)
    return type(module).__qualname__ if row is None else row.name


@dataclass(frozen=True)
class NodeCall:
    """One call of a graph, for the handlers of a :class:`~torchq.runtimes.emulation.Backend`.

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

    def argument(self, index: int, name: str, default: object = None) -> Any:
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
        candidates: list[TensorQuantizer] = []
        for reader in self._readers(self.node):
            quantizer = None if reader is None else self._quantizer(reader)
            if quantizer is None or not _is_integer_grid(quantizer):
                return None
            candidates.append(quantizer)
        same = len({_grid(quantizer) for quantizer in candidates}) == 1
        return candidates[0] if same and candidates[0].amax.numel() == 1 else None

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
    return (
        plain
        and quantizer.calibrated
        and not d.dynamic
        and isinstance(d.format, IntFormat)
    )


def _grid(quantizer: TensorQuantizer) -> tuple[object, ...]:
    scale, zero_point = quantizer.calculate_qparams()
    codes = tuple(zero_point.flatten().tolist())
    return tuple(scale.flatten().tolist()), codes, quantizer.descriptor.format


def _operation_called(name: str) -> str:
    """Return the name that :func:`operation_of` gives to what has this one, in torch or not."""
    row = operator_named(name)
    cls = getattr(nn, name, None)
    if row is None and isinstance(cls, type):
        row = next((row for row in OPERATORS.values() if cls in row.classes), None)
        return name if row is None else row.name
    return name.rstrip("_") if row is None else row.name


def _likely_meant(name: str) -> str | None:
    """Return a name of torch that one of nothing in torch is nearly; None where there is none."""
    homes = (torch, functional, Tensor, operator, nn)
    if any(hasattr(home, name) for home in (*homes, torch.ops.aten)):
        return None
    names = {
        known for home in homes for known in dir(home) if not known.startswith("_")
    }
    # At .85 a name of six letters may lack one of them.
    return next(iter(difflib.get_close_matches(name, sorted(names), 1, 0.85)), None)


#: ``handler(call, *args, **kwargs) -> value``: computes one call of a graph.
Handler = Callable[..., Any]


class Backend:
    """Computes the operations that it has handlers for, and leaves the others to torch.

    Several handlers of one operation form a chain: the one that was registered last is asked first,
    and its ``call.default`` is the one before it. Nothing is shared between backends, so what is
    registered with one is unknown to all others.

    Example:
        >>> backend = Backend().register("relu", lambda call, x: -call.default(x))
        >>> model = torch.nn.Sequential(torch.nn.ReLU())
        >>> runner = torchq.graph.GraphRunner(torch.fx.symbolic_trace(model))
        >>> runner.run(torch.ones(2), backend=backend)
        tensor([-1., -1.])
    """

    def __init__(self) -> None:
        self._handlers: dict[str, tuple[Handler, ...]] = {}

    def register(self, operation: str, handler: Handler) -> Backend:
        """Put ``handler`` before the others of ``operation``, and return this backend.

        Args:
            operation: what functions, methods and modules are called: ``"leaky_relu"`` is
                ``torch.nn.functional.leaky_relu`` and ``torch.nn.LeakyReLU``, and ``"add"`` is
                ``x + y``, ``x += y`` and ``torch.ops.aten.add``. Other names of these, such as
                ``"LeakyReLU"`` and ``"add_"``, name the same operation. A name that torch does not
                have is that of a function or class of your own; one that looks like a slip is
                warned of.
            handler: see :data:`Handler`. It must not change its arguments in place.

        Raises:
            ConfigError: the name is no text, or the handler no function.
        """
        if not isinstance(operation, str) or not operation:
            raise ConfigError(
                f"Backend.register: got the operation {short_repr(operation)}; expected its name, "
                "such as 'leaky_relu'"
            )
        if not callable(handler):
            raise ConfigError(
                f"Backend.register: got the handler {short_repr(handler)} for {operation!r}; "
                "expected a function handler(call, *args, **kwargs)"
            )
        likely = _likely_meant(operation)
        if likely is not None:
            warnings.warn(
                f"Backend.register: torch has nothing called {operation!r}, so only a function or "
                f"class of your own can have this handler; {likely!r} may be meant",
                stacklevel=2,
            )
        self._put(_operation_called(operation), handler)
        return self

    def _put(self, operation: str, handler: Handler) -> None:
        self._handlers[operation] = (*self._handlers.get(operation, ()), handler)

    def over(self, other: Backend) -> Backend:
        """Return a new backend with the handlers of both, these before those of ``other``."""
        joined = Backend()
        for source in (other, self):
            for operation in source.operations:
                for handler in source.handlers(operation):
                    joined._put(operation, handler)
        return joined

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations that have a handler."""
        return tuple(self._handlers)

    def handlers(self, operation: str) -> tuple[Handler, ...]:
        """Return the handlers of an operation, the last one asked first."""
        return self._handlers.get(_operation_called(operation), ())

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
        handlers = self._handlers.get(operation_of(node, graph_module), ())
        function = default
        for handler in handlers:
            function = partial(handler, NodeCall(graph_module, node, function))
        written = args[0] if args and handlers else None
        if isinstance(written, Tensor) and writes_first_argument(node, graph_module):
            return written.copy_(function(written.clone(), *args[1:], **kwargs))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Backend({', '.join(self._handlers) or 'no handlers'})"


# A multiplier that is shifted further is taken for 0.
_LARGEST_SHIFT = 31


def multiply(accumulator: Tensor, real: Tensor) -> Tensor:
    """Return ``accumulator * real`` as gemmlowp and the kernels of TensorFlow Lite round it.

    The product with a multiplier of 31 bits is rounded to its high half, half away from zero, and
    shifted right, half away from zero again.

    Args:
        accumulator: int64 with values of int32, any shape.
        real: float64 > 0 that broadcasts against it.

    Returns:
        int64, the shape of ``accumulator``.

    Example:
        >>> scale = torch.tensor(0.0049, dtype=torch.float64)
        >>> multiply(torch.tensor([1000, -12345]), scale)
        tensor([  5, -60])
    """
    multiplier, shift = quantize_multiplier(real)
    left_shift = shift.clamp(min=0)
    right = (-shift).clamp(min=0)
    product = (accumulator << left_shift) * multiplier
    # ``SaturatingRoundingDoublingHighMul`` of gemmlowp: half away from zero.
    nudge = torch.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = torch.div(product + nudge, 1 << 31, rounding_mode="trunc")
    # ``RoundingDivideByPOT`` of gemmlowp. Without a shift the remainder is 0, below any half.
    floor = high >> right
    remainder = high - (floor << right)
    half = torch.where(right > 0, 1 << (right - 1).clamp(min=0), 1)
    up = (remainder > half) | ((remainder == half) & (high >= 0))
    return floor + up.to(torch.int64)


def quantize_multiplier(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers with ``real = multiplier * 2**(shift - 31)``, as near as 31 bits allow.

    Reference: ``QuantizeMultiplier`` of TensorFlow Lite.

    Args:
        real: float64, >= 0 and finite, any shape.

    Returns:
        multiplier: int64 from ``2**30`` to ``2**31 - 1``; 0 for numbers below ``2**-32``.
        shift: int64, at least -31.

    Example:
        >>> quantize_multiplier(torch.tensor(0.75, dtype=torch.float64))
        (tensor(1610612736), tensor(0))
    """
    mantissa, exponent = torch.frexp(real)
    exponent = exponent.to(torch.int64)
    # Exact: 53 bits suffice.
    multiplier = (mantissa * 2.0**31 + 0.5).floor().to(torch.int64)
    carried = multiplier == 1 << 31
    multiplier = torch.where(carried, multiplier >> 1, multiplier)
    exponent = exponent + carried.to(torch.int64)
    lost = exponent < -_LARGEST_SHIFT
    return torch.where(lost, 0, multiplier), torch.where(lost, 0, exponent)


_INT32 = (-(2**31), 2**31 - 1)


def shift_leaky_relu(shift: int = 3) -> Backend:
    """Return a backend whose LeakyReLU shifts negative codes right, whatever its slope.

    ``x >> 3`` is ``x / 8`` rounded down; chips without multipliers compute it in place of a slope
    of 0.1. Only calls whose input is quantized to integers are treated; quantize it with
    ``Rule("type:LeakyReLU", input=...)``.

    Args:
        shift: the number of bits, 1 to 15.

    Raises:
        ConfigError: another number.
    """
    if type(shift) is not int or not 1 <= shift <= 15:
        raise ConfigError(f"shift_leaky_relu: got shift={shift!r}; expected 1 to 15")

    def handler(call: NodeCall, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        quantizer = call.quantizer_of(0)
        if quantizer is None or quantizer.amax.numel() != 1:
            return call.default(x, *args, **kwargs)
        codes, scale = _centered(x, quantizer)
        return ((torch.where(codes >= 0, codes, codes >> shift)) * scale).to(x.dtype)

    return Backend().register("leaky_relu", handler)


def integer_average_pooling() -> Backend:
    """Return a backend whose average pooling divides integer sums, half away from zero.

    The result has the scale and zero point of the input, as in TensorFlow Lite. Only calls whose
    input is quantized to integers are treated, with one range for the tensor.
    """

    def handler(call: NodeCall, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        quantizer = call.quantizer_of(0)
        if quantizer is None or quantizer.amax.numel() != 1:
            return call.default(x, *args, **kwargs)
        codes, scale = _centered(x, quantizer)
        zero_point = int(quantizer.calculate_qparams()[1])
        # A sum of codes over its count is exact in float64 where it is a tie.
        means = call.default(codes.double(), *args, **kwargs) + zero_point
        return ((round_(means, "half_away") - zero_point) * scale).to(x.dtype)

    backend = Backend()
    for operation in ("avg_pool1d", "avg_pool2d", "avg_pool3d"):
        backend.register(operation, handler).register(f"adaptive_{operation}", handler)
    return backend


def fixed_point() -> Backend:
    """Return a backend that computes layers and additions as TensorFlow Lite does.

    Sums of products of codes are int32, the bias is rounded to the product of the scales of input
    and weight, and the result is brought to the codes of the next quantizer by an integer
    multiplier and a shift. An addition brings both operands to one scale first, as the kernel ADD
    of TensorFlow Lite does. The values between the nodes are the codes times their scale.

    A convolution or a linear layer is treated if its input and its weight are quantized to
    integers, the input with one range, and the weight with one range or one for each output
    channel. If no quantizer, or several, read the result, it is the int32 sum times the scales, in
    floating point. An addition is treated if both operands and its result have one range.

    Raises:
        QuantizationError: while running: a sum leaves int32.
    """
    backend = Backend()
    for operation in ("conv1d", "conv2d", "conv3d", "linear"):
        backend.register(operation, _layer)
    return backend.register("add", _add)


def _layer(call: NodeCall, *args: Any, **kwargs: Any) -> Tensor:
    """Return the result of a convolution or linear layer; see :func:`fixed_point`."""
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "weight")
    if len(args) < 2 or call.module is not None or None in quantizers:
        return call.default(*args, **kwargs)
    x = args[0]
    weight = args[1]
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    x_codes, x_scale = _centered(x, quantizers[0])  # type: ignore[arg-type]
    w_codes, w_scale = _centered(weight, quantizers[1])  # type: ignore[arg-type]
    settings = {name: value for name, value in kwargs.items() if name != "bias"}
    place = -1 if weight.dim() == 2 else x.dim() - weight.dim() + 1
    if x_scale.numel() != 1 or w_scale.numel() not in (1, weight.shape[0]):
        return call.default(*args, **kwargs)
    # Products of codes and their sums are whole numbers below 2**53, so float64 is exact.
    sums = call.default(x_codes.double(), w_codes.double(), None, *args[3:], **settings)
    scales = x_scale.reshape(()) * w_scale.flatten()
    channels = [1] * sums.dim()
    channels[place] = -1
    if bias is not None:
        sums = sums + round_(bias.double() / scales, "half_away").view(channels)
    return _scaled(call, sums, scales.view(channels)).to(x.dtype)


def _add(call: NodeCall, *args: Any, **kwargs: object) -> Tensor:
    """Return a sum of two quantized tensors in the codes of the next quantizer.

    Reference: ``AddElementwise`` of TensorFlow Lite (kernels/internal/reference/add.h).
    """
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "other")
    reader = call.output_quantizer()
    ranges = [q is not None and q.amax.numel() == 1 for q in quantizers]
    if len(args) != 2 or kwargs or not all(ranges) or reader is None:
        return call.default(*args, **kwargs)
    pairs = zip(args, quantizers, strict=True)
    parts = [_centered(x, q) for x, q in pairs]  # type: ignore[arg-type]
    # Steps of twice the larger scale, so that the sum of two codes has the range of one.
    widest = 2 * torch.maximum(*(scale.reshape(()) for _, scale in parts))
    shifted = [
        multiply(codes << _HEADROOM, scale.reshape(()) / widest)
        for codes, scale in parts
    ]
    total = shifted[0] + shifted[1]
    return _requantized(total, widest / 2**_HEADROOM, reader).to(args[0].dtype)


#: Bits below the codes that the kernel ADD of TensorFlow Lite computes with.
_HEADROOM = 20


def _scaled(call: NodeCall, sums: Tensor, scales: Tensor) -> Tensor:
    """Return sums of products of codes as the next quantizer reads them."""
    accumulator = sums.to(torch.int64)
    if (
        accumulator.numel()
        and not _INT32[0] <= accumulator.min() <= accumulator.max() <= _INT32[1]
    ):
        raise QuantizationError(
            f"fixed_point: {call.node.name}: got a sum of {int(accumulator.abs().max())}; expected "
            "sums within int32. Use fewer bits, or a layer with fewer inputs"
        )
    reader = call.output_quantizer()
    if reader is None:
        return accumulator * scales
    return _requantized(accumulator, scales, reader)


def _requantized(
    accumulator: Tensor, scales: Tensor, reader: TensorQuantizer
) -> Tensor:
    """Return the values of the codes that a quantizer would read; ``scales`` are of the sums."""
    scale, zero_point = (t.double().reshape(()) for t in reader.calculate_qparams())
    codes = multiply(accumulator, scales / scale) + zero_point.to(torch.int64)
    format = reader.descriptor.format
    codes = codes.clamp(int(format.quant_min), int(format.quant_max))
    # One rounding in float32, as the quantizer computes its own values.
    return (codes - zero_point.to(torch.int64)).float() * scale.float()


def _centered(x: Tensor, quantizer: TensorQuantizer) -> tuple[Tensor, Tensor]:
    """Return the codes of quantized values less the zero point, int64, and the scale, float64."""
    scale = quantizer.calculate_qparams()[0].double()
    aligned = quantizer.descriptor.granularity.align(scale, x.shape)
    return (x.double() / aligned).round().to(torch.int64), scale
