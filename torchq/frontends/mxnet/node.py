"""One node of a symbol as converters see it, and their registry."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchq.frontends.building.graph import (
    Constant,
    Converters,
    FileNode,
    GraphBuilder,
    Value,
)

_FLAGS = {
    "True": True,
    "true": True,
    "1": True,
    "False": False,
    "false": False,
    "0": False,
}
_TYPES = "float16 float32 float64 bfloat16 uint8 int8 int32 int64 bool"
_DTYPES = {name: getattr(torch, name) for name in _TYPES.split()}


def _whole(text: str) -> int:
    value = float(text)
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def _whole_numbers(text: str) -> list[int | None]:
    """Return the items of ``(3, 3)``, ``[3,3]``, ``(2,)``, ``(3L, 3L)``, ``(None, 2)`` or ``3``."""
    entries = [item.strip() for item in text.strip("()[]").split(",") if item.strip()]
    if not all(re.fullmatch(r"None|-?\d{1,18}L?", item) for item in entries):
        raise ValueError(text)
    return [None if item == "None" else int(item.rstrip("L")) for item in entries]


#: How the text of an attribute is read by its type, and what errors expect.
_READERS: dict[object, tuple[Callable[[str], object], str]] = {
    bool: (_FLAGS.__getitem__, "True or False"),
    float: (float, "a number"),
    int: (_whole, "a whole number"),
    list: (_whole_numbers, "a tuple of whole numbers"),
    torch.dtype: (_DTYPES.__getitem__, f"one of {', '.join(_DTYPES)}"),
}


class SymbolContext(FileNode):
    """One node: its inputs, its attributes, and the calls that a converter writes in its place.

    Attributes are text; ``ndims`` has None for an input whose number of dimensions is not known,
    and ``outputs`` counts the outputs that are read.
    """

    format = "mxnet"
    ignored = re.compile(
        r"__\w+__|\w*(lr_mult|wd_mult)|ctx|ctx_group|"
        r"cudnn_\w+|force_mirroring|mirror_stage|workspace"
        r"|name|num_args|grad_scale|normalization|valid_thresh|out_grad|smooth_alpha|sparse_grad"
        r"|grad_req|stype|forward_stype|dtype_hint|profiler_scope|is_int|keep_highest"
    )

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

    def read(self, name: str, kind: type) -> Any:
        """Return an attribute in a type; ``"None"`` counts as left out."""
        self.seen.add(name)
        written = str(self.attributes.get(name, "None")).strip()
        if written == "None":
            return None
        reader, expected = _READERS.get(kind, (str, "text"))
        try:
            return reader(written)
        except (KeyError, ValueError):
            self.refuse(f"{name} is {written!r}; expected {expected}")

    def expect(self, name: str, *accepted: str) -> None:
        """Refuse an attribute unless it is left out or has one of the accepted texts."""
        written = self.attr(name)
        if written is not None and written not in accepted:
            self.refuse(f"{name} is {written!r}; expected {' or '.join(accepted)}")

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

    def layer(self, module: nn.Module, x: Value = None) -> Value:
        """Call a layer on the first input, under the name of the owner of its weight."""
        weight = getattr(self.input(1), "name", "")
        match = re.fullmatch(r"(.+)_(weight|gamma)", weight)
        x = self.inputs[0] if x is None else x
        return self.module(module, x, name=match[1] if match else self.name)


#: From the name of an operator to its converter.
CONVERTERS = Converters("MXNet operator")
converter, row = CONVERTERS.converter, CONVERTERS.row
