"""Sums, products, concatenations and matrix products as modules, so that their inputs can have quantizers.

Write ``self.add = torchq.nn.QuantAdd()`` in a model and call ``self.add(x, y)`` for ``x + y``; or write the float modules and let a rule
quantize them; or let :func:`torchq.quantize_` with ``target=`` put them in place of the operators that it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register

__all__ = [
    "ELEMENTWISE",
    "Add",
    "Cat",
    "MatMul",
    "Mul",
    "QuantAdd",
    "QuantCat",
    "QuantMatMul",
    "QuantMul",
    "QuantTap",
    "Tap",
]


class Add(nn.Module):
    """``input + other``."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        return input + other


class Mul(nn.Module):
    """``input * other``."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        return input * other


class MatMul(nn.Module):
    """``torch.matmul(input, other)``."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.matmul(input, other)


class Cat(nn.Module):
    """``torch.cat(tensors, dim)``.

    Args:
        dim: where to concatenate, unless the call says.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor], dim: int | None = None) -> Tensor:
        return torch.cat(list(tensors), self.dim if dim is None else dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class Tap(nn.Identity):
    """Returns its input: a place in a forward where a quantizer can sit."""


#: The float modules of this file by name.
ELEMENTWISE: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (Add, Mul, MatMul, Cat, Tap)
}


class _QuantBinary(QuantModule):
    """``input_quantizer`` for the first operand and ``other_quantizer`` for the second, from one descriptor.

    An operand that is no floating-point tensor (a number, an index) passes unquantized.
    """

    quantizers = ("input",)
    operands: ClassVar[tuple[str, ...]] = ("input", "other")

    other_quantizer: nn.Module

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        super()._attach(**dict.fromkeys(self.operands, descriptors["input"]))

    def _detach(self) -> None:
        for operand in self.operands:
            delattr(self, f"{operand}_quantizer")

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
    """:class:`Cat` of tensors that share one range, so that a runtime can concatenate their codes as they are.

    The one ``input_quantizer`` sees every tensor.
    """

    quantizers = ("input",)

    def forward(self, tensors: Sequence[Tensor], dim: int | None = None) -> Tensor:
        return super().forward(
            [_quantized(self.input_quantizer, tensor) for tensor in tensors], dim
        )


@register(Tap)
class QuantTap(QuantModule, Tap):
    """Returns its input quantized."""

    quantizers = ("input",)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(self.input_quantizer(input))
