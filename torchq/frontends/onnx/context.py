"""What converters see of an ONNX file: one node, the graph under construction, the registry."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.frontends.building import graph
from torchq.frontends.building.graph import (
    Constant,
    Converters,
    F,
    FileNode,
    Ints,
    Value,
    stack_ints,
)
from torchq.nn import TensorQuantizer


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a tensor of a file is quantized."""

    scale: (
        Tensor  # float32: one number, one for each index of axis, or one for each block
    )
    zero_point: Tensor  # of the element type of the codes
    axis: int  # of the scales, or that the blocks lie along
    bits: int = 0  # 0 for those of the element type
    block_size: int = 0  # 0 without blocks

    def permuted(self, order: Sequence[int]) -> Quantization:
        """Return how the tensor is quantized after its dimensions were put into another order."""
        axis = list(order).index(self.axis % len(order))
        if not self.block_size:
            return replace(self, axis=axis)
        parts = [part.permute(*order) for part in (self.scale, self.zero_point)]
        return replace(self, scale=parts[0], zero_point=parts[1], axis=axis)

    def equals(self, other: Quantization) -> bool:
        """Return True if both give the same codes."""
        return (
            self.zero_point.dtype == other.zero_point.dtype
            and (self.bits, self.block_size) == (other.bits, other.block_size)
            and (self.axis == other.axis or self.scale.numel() == 1)
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )


class GraphBuilder(graph.GraphBuilder):
    """What has been converted so far."""

    checks_sizes = True

    def __init__(
        self, where: str, convert: Callable[[GraphBuilder, Any], list[Value]]
    ) -> None:
        super().__init__(where)
        self._convert = convert
        self.shapes: dict[str, list[int | None]] = {}
        self.dtypes: dict[str, torch.dtype | None] = {}
        self.readers: collections.Counter[str] = collections.Counter()
        # Of nodes that make codes: their source and how it is quantized; the values of the codes.
        self.codes: dict[fx.Node, tuple[Value, Quantization]] = {}
        self.dequantized: dict[fx.Node, Value] = {}
        # With their sources.
        self.quantizers: dict[fx.Node, tuple[Value, TensorQuantizer]] = {}
        self.weights: dict[Constant, Quantization] = {}
        # Of a node that computes a whole shape what has it, its dimensions not being known.
        self.shaped: dict[Value, fx.Node] = {}
        self.four_bits: set[Constant] = set()

    def convert_nodes(self, graph: object) -> list[Value]:
        """Convert the nodes of a sub-graph in place, and return its outputs."""
        return self._convert(self, graph)

    def inside(self) -> GraphBuilder:
        """Return a builder for a sub-graph, which knows only the constants of this one."""
        inner = GraphBuilder(self.where, self._convert)
        named_values = self.values.items()
        inner.values = {
            n: v for n, v in named_values if v is None or isinstance(v, Constant)
        }
        for name in (
            "parameters",
            "shapes",
            "dtypes",
            "readers",
            "weights",
            "four_bits",
        ):
            setattr(inner, name, getattr(self, name))
        return inner

    def add_bias(self, node: fx.Node, value: Constant) -> fx.Node | None:
        """Give a constant to the layer that ``node`` calls as its bias if it may.

        It has one number for each output channel: (out,) or (1, out) of tokens, and of an image
        (1, out, 1, 1) or (out, 1, 1).
        """
        layer: Any = None
        if node.op == "call_module":
            layer = self.root.get_submodule(str(node.target))
        names = [name for name, other in self.values.items() if other is node]
        if type(layer) not in _WITH_BIAS or layer.bias is not None or node.users:
            return None
        shape = list(value.tensor.shape)
        if type(layer) is nn.Linear:
            result = self.shapes.get(names[0]) if names else None
            most = 1 if result is None else len(result)
            of_tokens = [*(1 for _ in shape[1:]), layer.out_features]
            is_bias = shape == of_tokens and len(shape) <= most
        else:
            of_channels = [layer.out_channels, *(1 for _ in layer.kernel_size)]
            is_bias = shape in (of_channels, [1, *of_channels])
        if not is_bias or value.tensor.dtype != layer.weight.dtype:
            return None
        if len(names) > 1 or self.readers[names[0]] > 1:
            return None
        layer.bias = self.parameter(value, tensor=value.tensor.reshape(-1))
        return node


#: Layers with a bias, whose files may add it in an operator of its own.
_WITH_BIAS = frozenset(
    [
        nn.Linear,
        nn.Conv1d,
        nn.Conv2d,
        nn.Conv3d,
        nn.ConvTranspose1d,
        nn.ConvTranspose2d,
        nn.ConvTranspose3d,
    ]
)


class NodeContext(FileNode):
    """One node: its inputs, its attributes, and the calls that a converter writes in its place.

    ``version`` is the opset of the operator's domain; inputs that are left out are None.
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
        """Return the elements (numbers, nodes) of an input of sizes, None for other tensors."""
        value = self.input(index)
        if isinstance(value, Constant):
            integers = (
                not value.tensor.is_floating_point()
                and value.tensor.dtype is not torch.bool
            )
            return value.tensor.reshape(-1).tolist() if integers else None
        if not isinstance(value, Ints) or value.dtype not in (torch.int64, torch.int32):
            return None
        return list(value.items)

    def ints_or_input(self, index: int) -> Any:
        """Return an input of sizes as a list, or as it is where the network computes the tensor."""
        numbers = self.ints(index)
        return self.input(index) if numbers is None else numbers

    def number(self, index: int) -> Any:
        """Return an input of one number as a number where it is known, else as it is."""
        constant = self.constant(index)
        return self.input(index) if constant is None else constant.reshape(-1)[0].item()

    def axes(self, index: int = 1) -> list[int] | None:
        """Return axes: an attribute in old versions, an input in newer ones; None if left out."""
        axes = self.attr("axes", list | None)
        if axes is not None or self.input(index) is None:
            return axes
        return [int(axis) for axis in self.known(index, "axes").reshape(-1).tolist()]

    def shape(self, index: int) -> list[int | None] | None:
        """Return the shape of an input: None for a size, or for all of it, that is not known."""
        value = self.input(index)
        if isinstance(value, Constant):
            return list(value.tensor.shape)
        if isinstance(value, Ints):
            return [] if value.scalar else [len(value.items)]
        return self.builder.shapes.get(self.input_names[index])

    def ndim(self, index: int) -> int:
        """Return the number of dimensions of an input, which must be known."""
        shape = self.shape(index)
        if shape is None:
            self.refuse(
                f"the number of dimensions of {self.input_names[index]!r} is not known"
            )
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
        """Return integers as a value (see :class:`Ints`): a constant where all are known."""
        if dtype is None:
            dtypes = (value.dtype for value in self.inputs if isinstance(value, Ints))
            dtype = next(dtypes, torch.int64)
        if all(isinstance(item, int) for item in items):
            return Constant(stack_ints(items, scalar, dtype))  # type: ignore[arg-type]
        return Ints(tuple(items), scalar, dtype)

    def arithmetic(
        self, function: Callable[..., Any], *args: int | fx.Node
    ) -> int | fx.Node:
        """Compute one number from numbers, at once where all are known."""
        if all(isinstance(item, int) for item in args):
            return int(function(*args))
        return self.function_node(function, args)

    def size(self, index: int, axis: int) -> int | fx.Node:
        """Return one size of an input: a number where the file fixes it."""
        shape = self.shape(index)
        if shape is not None and shape[axis] is not None:
            return int(shape[axis])  # type: ignore[arg-type]
        source = self.tensor(self.inputs[index])
        return self.builder.graph.call_method("size", (source, axis))


#: The element types that torch computes with on every device.
_NAMES = "float32 float64 float16 bfloat16 bool uint8 int8 int16 int32 int64"
NUMBERS = frozenset(getattr(torch, name) for name in _NAMES.split())
#: Those that torch stores, and computes little with.
UNSIGNED = frozenset([torch.uint16, torch.uint32, torch.uint64])
#: From an operator, behind its domain and a dot if that is not ONNX's own, to its converter and the
#: element types that this can handle, None for any that torch has.
CONVERTERS = Converters("ONNX operator")


def converter(
    *op_types: str, domain: str = "", dtypes: frozenset[torch.dtype] | None = NUMBERS
) -> Callable[[F], F]:
    """Enter the decorated function as the converter of operators.

    Args:
        op_types: names such as ``"Conv"`` that have no converter yet.
        domain: of the operators, ``""`` for ONNX's own.
        dtypes: element types of inputs and outputs that the converter can handle; None for any that
            torch has.
    """
    return CONVERTERS.converter(
        *(qualified(domain, name) for name in op_types), about=dtypes
    )


def qualified(domain: str, op_type: str) -> str:
    """Return the key of an operator in :data:`CONVERTERS`."""
    return f"{domain}.{op_type}" if domain else op_type


def row(op_types: str, function: Callable[..., object], **attributes: object) -> None:
    """Enter operators on numbers that one function computes; see :meth:`Converters.row`."""
    CONVERTERS.row(op_types, function, about=NUMBERS, **attributes)
