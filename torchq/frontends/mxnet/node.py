"""One node of a symbol as converters see it, and their registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchq.frontends.building.graph import Constant, FileNode, GraphBuilder, Value, entering
from torchq.utils import Registry

#: Attributes that say how MXNet computes or trains, not what a network computes.
_IGNORED = re.compile(
    r"__\w+__|\w*(lr_mult|wd_mult)|ctx|ctx_group|cudnn_\w+|force_mirroring|mirror_stage|workspace"
    r"|name|num_args|grad_scale|normalization|valid_thresh|out_grad|smooth_alpha|sparse_grad"
    r"|grad_req|stype|forward_stype|dtype_hint|profiler_scope"
)
_DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}


class SymbolContext(FileNode):
    """One node: its inputs, its attributes, and the calls that a converter writes in its place.

    Args:
        builder: what collects the graph.
        op_type: the operator.
        name: of the node.
        attributes: as text.
        inputs: the values of the inputs.
        ndims: the number of dimensions of each input, None where it is not known.
        outputs: how many outputs of the node are read.
    """

    format = "mxnet"

    def __init__(
        self,
        builder: GraphBuilder,
        op_type: str,
        name: str,
        attributes: dict[str, Any],
        inputs: list[Value],
        ndims: list[int | None],
        outputs: int,
    ) -> None:
        super().__init__(builder, op_type, name, attributes, inputs)
        self.ndims, self.outputs = ndims, outputs
        self._read: set[str] = set()

    def attr(self, name: str, default: Any = None) -> Any:
        """Return the text of an attribute, or ``default``; ``"None"`` counts as left out."""
        self._read.add(name)
        text = self.attributes.get(name)
        return default if text is None or text.strip() == "None" else text.strip()

    def check_all_read(self) -> None:
        """Refuse attributes that the converter did not read, which may change the result."""
        unread = [key for key in self.attributes if key not in self._read]
        unknown = sorted(key for key in unread if not _IGNORED.fullmatch(key))
        if unknown:
            self.refuse(f"got the attributes {', '.join(unknown)}, which are not supported")

    def expect(self, name: str, *accepted: str) -> None:
        """Refuse an attribute unless it is left out or has one of the accepted texts."""
        text = self.attr(name)
        if text is not None and text not in accepted:
            choice = " or ".join(accepted) or "no such setting"
            self.refuse(f"{name} is {text!r}; expected {choice}")

    def text(self, name: str, default: str | None = None) -> str:
        """Return an attribute as text; without a default it is required."""
        found = self.attr(name, default)
        return str(self.required(name) if found is None else found)

    def flag(self, name: str, default: bool) -> bool:
        """Return an attribute that is true or false."""
        text = str(self.attr(name, str(default)))
        if text not in ("True", "true", "1", "False", "false", "0"):
            self.refuse(f"{name} is {text!r}; expected True or False")
        return text in ("True", "true", "1")

    def number(self, name: str, default: float | None = None) -> float:
        """Return an attribute that is a number; without a default it is required."""
        text = self.text(name, None if default is None else repr(default))
        try:
            return float(text)
        except ValueError:
            self.refuse(f"{name} is {text!r}; expected a number")

    def integer(self, name: str, default: int | None = None) -> int:
        """Return an attribute that is a whole number; without a default it is required."""
        value = self.number(name, default)
        if value != value // 1:
            self.refuse(f"{name} is {value}; expected a whole number")
        return int(value)

    def ints(self, name: str, default: Sequence[int] | None = None) -> list[Any]:
        """Return an attribute that is a tuple, or a single number, as a list.

        ``(3, 3)``, ``[3,3]``, ``(2,)``, ``(3L, 3L)``, ``(None, 2)``, ``()`` and ``3`` are all
        written by some version.
        """
        text = self.attr(name)
        if text is None:
            if default is None:
                self.required(name)
            return list(default or [])
        items = [item.strip() for item in text.strip("()[]").split(",") if item.strip()]
        if not all(re.fullmatch(r"None|-?\d{1,18}L?", item) for item in items):
            self.refuse(f"{name} is {text!r}; expected a tuple of whole numbers")
        return [None if item == "None" else int(item.rstrip("L")) for item in items]

    def axis(self) -> int | None:
        """Return the attribute ``axis``, None for all elements as one line."""
        return None if self.attr("axis") is None else self.integer("axis")

    def read(self, *attributes: tuple[Any, ...]) -> list[Any]:
        """Return attributes, each given as the method that reads it and what the method takes."""
        return [getattr(self, method)(*rest) for method, *rest in attributes]

    def dtype(self, name: str, default: torch.dtype = torch.float32) -> torch.dtype:
        """Return an attribute that names an element type."""
        text = self.attr(name)
        if text is not None and text not in _DTYPES:
            self.refuse(f"{name} is {text!r}; expected one of {', '.join(_DTYPES)}")
        return default if text is None else _DTYPES[text]

    def ndim(self, index: int) -> int | None:
        """Return the number of dimensions of an input, None if it is not known."""
        return self.ndims[index] if index < len(self.ndims) else None

    def parameter(self, index: int, what: str) -> Constant:
        """Return an input that must be in the parameters of the file.

        Raises:
            FrontendError: the network computes the input, or the file lacks it.
        """
        value = self.input(index)
        if not isinstance(value, Constant):
            self.refuse(
                f"its {what} is not a parameter; expected it in the parameters of the file. "
                "Write both files with `net.export` or `mx.model.save_checkpoint`"
            )
        return value

    def layer_name(self) -> str:
        """Return where to put a layer: the owner of its weight, else the name of the node."""
        for value in self.inputs[1:2]:
            found = re.fullmatch(r"(.+)_(weight|gamma)", getattr(value, "name", ""))
            if found:
                return found[1]
        return self.name


Converter = Callable[[SymbolContext], "Value | Sequence[Value]"]

#: From the name of an operator to its converter.
CONVERTERS: Registry[str, Converter] = Registry("MXNet operator")


def converter(*op_types: str) -> Callable[[Converter], Converter]:
    """Enter the decorated function as the converter of operators.

    Args:
        op_types: names such as ``"Convolution"``.

    Raises:
        ConfigError: one of the operators has a converter already.
    """
    return entering(CONVERTERS, op_types)


def operator(names: str, function: Callable[..., object], *attributes: tuple[Any, ...]) -> None:
    """Enter operators that one function computes, of all inputs and then of attributes.

    An attribute is the method of the node that reads it, and what the method takes.
    """

    def convert(node: SymbolContext) -> Value:
        return node.call(function, *node.inputs, *node.read(*attributes))

    converter(*names.split())(convert)
