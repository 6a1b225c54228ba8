"""The functions whose calls can be quantized, and the sites in a forward where they are called."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.nn.modules.operators import ScaledDotProductAttention


@dataclass(frozen=True)
class Function:
    """A function of torch that multiplies an input by a weight.

    Attributes:
        kind: Its name in :class:`CallSite`.
        layer: The float class that computes the same; rules for this class apply to the call.
        left, right: Position and keyword of the two operands.
        symmetric: True where the weight may be either operand; else it is the right one.
    """

    kind: str
    layer: type[nn.Module]
    left: tuple[int, str] = (0, "input")
    right: tuple[int, str] = (1, "weight")
    symmetric: bool = False


_LINEAR = Function("linear", nn.Linear)
_MATMUL = Function("matmul", nn.Linear, right=(1, "other"), symmetric=True)
_MM = Function("matmul", nn.Linear, right=(1, "mat2"), symmetric=True)
_ADDMM = Function("addmm", nn.Linear, left=(1, "mat1"), right=(2, "mat2"), symmetric=True)
_BADDBMM = Function("addmm", nn.Linear, left=(1, "batch1"), right=(2, "batch2"), symmetric=True)
_EINSUM = Function("einsum", nn.Linear, (1, "operands"), (2, "operands"), symmetric=True)
_TENSORDOT = Function("tensordot", nn.Linear, (0, "a"), (1, "b"), symmetric=True)
_ATTENTION = Function("attention", ScaledDotProductAttention)

#: Function object -> what it computes. torch.Tensor's methods are functions of their own.
FUNCTIONS: dict[Callable[..., Any], Function] = {
    F.linear: _LINEAR,
    F.conv1d: Function("conv1d", nn.Conv1d),
    F.conv2d: Function("conv2d", nn.Conv2d),
    F.conv3d: Function("conv3d", nn.Conv3d),
    F.conv_transpose1d: Function("conv_transpose1d", nn.ConvTranspose1d),
    F.conv_transpose2d: Function("conv_transpose2d", nn.ConvTranspose2d),
    F.conv_transpose3d: Function("conv_transpose3d", nn.ConvTranspose3d),
    torch.matmul: _MATMUL,
    Tensor.matmul: _MATMUL,
    Tensor.__matmul__: _MATMUL,
    operator.matmul: _MATMUL,
    torch.mm: _MM,
    Tensor.mm: _MM,
    torch.bmm: _MM,
    Tensor.bmm: _MM,
    torch.addmm: _ADDMM,
    Tensor.addmm: _ADDMM,
    torch.baddbmm: _BADDBMM,
    Tensor.baddbmm: _BADDBMM,
    torch.einsum: _EINSUM,
    torch.tensordot: _TENSORDOT,
    F.scaled_dot_product_attention: _ATTENTION,
}
#: Functions that multiply by weights too, here or in other forms of their arguments.
OTHER_PRODUCTS: dict[Callable[..., Any], str] = {
    torch.einsum: "einsum",
    torch.bilinear: "bilinear",
    F.bilinear: "bilinear",
    torch.mv: "mv",
    Tensor.mv: "mv",
    torch.addmv: "addmv",
    Tensor.addmv: "addmv",
    torch.addbmm: "addbmm",
    Tensor.addbmm: "addbmm",
    torch.inner: "inner",
    Tensor.inner: "inner",
    torch.linalg.multi_dot: "multi_dot",
    torch.convolution: "convolution",
    torch.conv_tbc: "conv_tbc",
}
_BY_KIND = {function.kind: function for function in FUNCTIONS.values()}


@dataclass(frozen=True)
class CallSite:
    """One call in the forward of a module.

    Attributes:
        kind: The :attr:`Function.kind` of the called function.
        weight: The dotted path of the parameter that is the weight, seen from the module; "" where
            the forward computes the weight, and for attention.
        holder: The dotted path of the child whose quantizers are used; "" is the module itself.
        weight_is_left: True where the weight is the left operand of a symmetric function.
        number: Of a site without a parameter: how many such calls of the kind come before it.
        total: Of a site without a parameter: how many such calls of the kind one forward makes.
    """

    kind: str
    weight: str = ""
    holder: str = ""
    weight_is_left: bool = False
    number: int = 0
    total: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CallSite:
        """Return the site that :meth:`to_dict` described."""
        expected = {name: type(value) for name, value in asdict(cls("linear")).items()}
        types = {name: type(value) for name, value in data.items()}
        if types != expected or data["kind"] not in _BY_KIND:
            raise ConfigError(f"call site: got {dict(data)}; expected the fields {expected}")
        for path in (data["weight"], data["holder"]):
            if path and not all(name.isidentifier() or name.isdigit() for name in path.split(".")):
                raise ConfigError(f"call site: got the path {path!r}; expected names and dots")
        return cls(**data)


def function_of(func: Callable[..., Any], args: tuple[Any, ...]) -> Function | None:
    """Return what a call computes; None for other functions, and for einsum of other than two."""
    function = FUNCTIONS.get(func)
    return None if function is _EINSUM and len(args) != 3 else function


def equivalent_class(kind: str) -> type[nn.Module]:
    """Return the float class whose rules apply to calls of ``kind``."""
    return _BY_KIND[kind].layer


def operand(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: tuple[int, str]) -> Any:
    """Return the argument at a position or under a keyword, or None."""
    position, name = place
    return args[position] if position < len(args) else kwargs.get(name)


def with_operands(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], changed: Mapping[tuple[int, str], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with some of them replaced, given by position and keyword."""
    new, named = list(args), dict(kwargs)
    for (position, name), value in changed.items():
        if position < len(new):
            new[position] = value
        else:
            named[name] = value
    return tuple(new), named


def site_descriptors(
    site: CallSite, weight_ndim: int, input: QuantDescriptor | None, weight: QuantDescriptor | None
) -> tuple[QuantDescriptor | None, QuantDescriptor | None]:
    """Return the descriptors of a rule for layers, adapted to the layout of a call.

    ``x @ w`` and ``addmm`` have their output channels on the last axis of the weight (in, out),
    where a linear layer (out, in) has them on axis 0; blocks follow the axis that is summed over.
    In einsum and tensordot any axis may be summed over, so the weight has one scale.
    """
    if site.kind in ("einsum", "tensordot"):
        if weight is not None and weight.block_size is None and weight.axis is not None:
            weight = weight.replace(axis=None, name=None)
        return input, weight
    if site.kind not in ("matmul", "addmm"):
        return input, weight
    if site.weight_is_left:
        if input is not None and input.block_size is not None and input.block_axis == -1:
            input = input.replace(block_axis=-2)
        if weight is not None and weight.axis == (0,):
            weight = weight.replace(axis=tuple(range(weight_ndim - 1)))
        return input, weight
    if weight is not None and weight.block_size is not None and weight.block_axis == -1:
        weight = weight.replace(block_axis=-2)
    elif weight is not None and weight.axis == (0,):
        kept = (*range(weight_ndim - 2), weight_ndim - 1)
        weight = weight.replace(axis=kept)
    return input, weight
