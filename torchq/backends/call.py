"""One call of a graph as handlers see it: what is called, and the quantizers around it."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from torchq.formats import IntFormat
from torchq.graph.operators import MAX_POOLING, REARRANGING, operator_name
from torchq.nn import TensorQuantizer

__all__ = ["Call", "operation_of", "writes_first_argument"]

# Operators that return codes for codes, one grid before and behind them.
_KEEPS_GRID = (
    REARRANGING | MAX_POOLING | frozenset(["relu", "dropout", "identity", "adaptive_max_pool2d"])
)
_MODULES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.AdaptiveAvgPool1d, "adaptive_avg_pool1d"),
    (nn.AdaptiveAvgPool2d, "adaptive_avg_pool2d"),
    (nn.AdaptiveAvgPool3d, "adaptive_avg_pool3d"),
    (nn.AdaptiveMaxPool2d, "adaptive_max_pool2d"),
    (nn.AvgPool1d, "avg_pool1d"),
    (nn.AvgPool2d, "avg_pool2d"),
    (nn.AvgPool3d, "avg_pool3d"),
    (nn.Conv1d, "conv1d"),
    (nn.Conv2d, "conv2d"),
    (nn.Conv3d, "conv3d"),
    (nn.ConvTranspose1d, "conv_transpose1d"),
    (nn.ConvTranspose2d, "conv_transpose2d"),
    (nn.ConvTranspose3d, "conv_transpose3d"),
    (nn.Dropout, "dropout"),
    (nn.Flatten, "flatten"),
    (nn.Identity, "identity"),
    (nn.LeakyReLU, "leaky_relu"),
    (nn.Linear, "linear"),
    (nn.MaxPool1d, "max_pool1d"),
    (nn.MaxPool2d, "max_pool2d"),
    (nn.MaxPool3d, "max_pool3d"),
    (nn.PixelShuffle, "pixel_shuffle"),
    (nn.ReLU, "relu"),
)
#: The functions behind ``x += y`` and its like, by the names of what they compute.
_ASSIGNING = {
    getattr(operator, short): name
    for short, name in (
        *(("iadd", "add"), ("isub", "sub"), ("imul", "mul"), ("itruediv", "div")),
        *(("imatmul", "matmul"), ("ipow", "pow")),
    )
}


def writes_first_argument(node: fx.Node, graph_module: fx.GraphModule) -> bool:
    """Return True if a call writes its result into its first argument, as ``relu_`` does.

    Args:
        node: a node that calls something.
        graph_module: the graph and its modules.
    """
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        return getattr(module, "inplace", False) is True
    if node.target in _ASSIGNING or _is_underscored(operator_name(node.target).partition(".")[0]):
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

    Args:
        node: a node that calls something.
        graph_module: the graph and its modules.

    Returns:
        Such as ``"leaky_relu"``, which also stands for ``torch.nn.LeakyReLU``. A class of modules
        without a function gives its own name.
    """
    if node.op != "call_module":
        name = operator_name(node.target).partition(".")[0]
        plain = name[:-1] if _is_underscored(name) else name
        return _ASSIGNING.get(node.target, plain)
    module = graph_module.get_submodule(str(node.target))
    for cls, name in _MODULES:
        if isinstance(module, cls):
            return name
    return type(module).__qualname__


@dataclass(frozen=True)
class Call:
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
        return calls and operation_of(node, self.graph_module) in _KEEPS_GRID


def _is_integer_grid(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    plain = quantizer.quantizing and d.fake_quant and quantizer.delegate is None
    return plain and quantizer.calibrated and not d.dynamic and isinstance(d.format, IntFormat)


def _grid(quantizer: TensorQuantizer) -> tuple[object, ...]:
    scale, zero_point = quantizer.calculate_qparams()
    codes = tuple(zero_point.flatten().tolist())
    return tuple(scale.flatten().tolist()), codes, quantizer.descriptor.format
