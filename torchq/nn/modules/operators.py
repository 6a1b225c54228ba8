"""Operators as modules, so that their operands can have quantizers.

There are three ways to use them. Write ``self.add = torchq.nn.QuantAdd()`` in a model and call
``self.add(x, y)`` for ``x + y``. Write the float modules and let a rule quantize them. Or let
:func:`torchq.quantize_` with ``target=`` put them in the place of the operators that it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.convert import QuantModule, register
from torchq.nn.modules.input_quantized import InputQuantized

__all__ = [
    "Add",
    "Cat",
    "MatMul",
    "Mul",
    "OPERATORS",
    "QuantAdd",
    "QuantCat",
    "QuantMatMul",
    "QuantMul",
    "QuantTap",
    "ScaledDotProductAttention",
    "Tap",
    "stand_in",
]


class Add(nn.Module):
    """The operator ``input + other`` as a module."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        """Return ``input + other``."""
        return input + other


class Mul(nn.Module):
    """The operator ``input * other`` as a module."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        """Return ``input * other``."""
        return input * other


class MatMul(nn.Module):
    """The function ``torch.matmul(input, other)`` as a module."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return the matrix product."""
        return torch.matmul(input, other)


class Cat(nn.Module):
    """The function ``torch.cat(tensors, dim)`` as a module.

    Args:
        dim: The dimension along which calls without ``dim`` concatenate.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor], dim: int | None = None) -> Tensor:
        """Return the concatenation along ``dim``, by default :attr:`dim`."""
        return torch.cat(list(tensors), self.dim if dim is None else dim)

    def extra_repr(self) -> str:
        """Return the dimension, for ``repr``."""
        return f"dim={self.dim}"


class ScaledDotProductAttention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention` as a module.

    Its operands can have quantizers; see :class:`torchq.nn.QuantScaledDotProductAttention`.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return attention; the arguments are those of the function."""
        attend = F.scaled_dot_product_attention
        return attend(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


class Tap(nn.Identity):
    """Identity that marks a place in a forward where a quantizer can sit."""


#: The float modules of this file, by class name.
OPERATORS: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (Add, Mul, MatMul, Cat, ScaledDotProductAttention, Tap)
}


def stand_in(cls: type[nn.Module]) -> nn.Module:
    """Return a module that computes what its function does, called with the same arguments.

    Args:
        cls: One of the classes of :data:`OPERATORS`.
    """
    return Cat(0) if cls is Cat else cls()  # torch.cat has another default than its module.


class _QuantBinary(QuantModule):
    """Base of operators with two operands, each with its own range.

    An operand that is not a floating-point tensor (a number, an index) is not quantized.
    """

    input_slots = ("input", "other")
    weight_slots = ()

    other_quantizer: nn.Module

    def forward(self, input: Any, other: Any) -> Tensor:
        return super().forward(
            _quantized(self.input_quantizer, input), _quantized(self.other_quantizer, other)
        )


def _quantized(quantizer: nn.Module, value: Any) -> Any:
    return quantizer(value) if isinstance(value, Tensor) and value.is_floating_point() else value


@register(Add)
class QuantAdd(_QuantBinary, Add):
    """:class:`Add` of quantized operands, each with its own range.

    Example:
        >>> add = torchq.nn.QuantAdd()
        >>> add.input_quantizer.set_amax(127.0)
        >>> add.other_quantizer.set_amax(12.7)
        >>> add(torch.tensor([1.4]), torch.tensor([0.24]))
        tensor([1.2000])
    """


@register(Mul)
class QuantMul(_QuantBinary, Mul):
    """:class:`Mul` of quantized operands, each with its own range."""


@register(MatMul)
class QuantMatMul(_QuantBinary, MatMul):
    """:class:`MatMul` of quantized operands, each with its own range."""


@register(Cat)
class QuantCat(QuantModule, Cat):
    """:class:`Cat` of tensors that share one range, so that a runtime can concatenate their codes.

    The one ``input_quantizer`` sees every tensor.
    """

    weight_slots = ()

    def forward(self, tensors: Sequence[Tensor], dim: int | None = None) -> Tensor:
        """Return the concatenation of the quantized tensors."""
        return super().forward(
            [_quantized(self.input_quantizer, tensor) for tensor in tensors], dim
        )


@register(Tap)
class QuantTap(InputQuantized, Tap):
    """:class:`Tap` that returns its input quantized."""
