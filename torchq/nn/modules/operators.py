"""Operators as modules, so that their operands can have quantizers.

There are three ways to use them. Write ``self.add = torchq.nn.QuantAdd()`` in a model and call
``self.add(x, y)`` for ``x + y``. Write the float modules and let a rule quantize them. Or let
:func:`torchq.quantize_` with ``target=`` put them in the place of the operators that it finds.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.functional.windows import windows_of_call
from torchq.graph import KINDS
from torchq.graph import OPERATORS as ROWS
from torchq.nn.convert import QuantModule, float_class_of, register
from torchq.nn.integer_kernel import (
    integer_average,
    integer_matmul,
    integer_multiplication,
    integer_sigmoid,
    integer_sum,
)
from torchq.nn.kept_numbers import are_plain_numbers
from torchq.nn.modules.input_quantized import InputQuantized
from torchq.nn.tensor_quantizer import TensorQuantizer


class Add(nn.Module):
    """The operator ``input + other`` as a module."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        """Return ``input + other``."""
        result: Tensor = input + other
        return result


class Mul(nn.Module):
    """The operator ``input * other`` as a module."""

    def forward(self, input: Tensor, other: Any) -> Tensor:
        """Return ``input * other``."""
        result: Tensor = input * other
        return result


class MatMul(nn.Module):
    """The function ``torch.matmul(input, other)`` as a module."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return the matrix product."""
        return torch.matmul(input, other)


class Maximum(nn.Module):
    """The function ``torch.maximum(input, other)`` as a module."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return the larger one of each two elements."""
        return torch.maximum(input, other)


class Cat(nn.Module):
    """The function ``torch.cat(tensors, dim)`` as a module.

    Args:
        dim: The dimension along which calls without ``dim`` concatenate.
        ranges: The number of ranges of the quantized twin: one for all tensors, or one for each.
    """

    def __init__(self, dim: int = 1, ranges: int = 1) -> None:
        super().__init__()
        self.dim, self.ranges = dim, ranges

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
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


class Tap(nn.Identity):
    """Identity that marks a place in a forward where a quantizer can sit."""


#: The float modules of this file that rows of :mod:`torchq.graph.operators` name.
OPERATORS: dict[str, type[nn.Module]] = {
    name: globals()[name] for name in KINDS.values()
}


def function_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function of torch that a module of this file computes, quantized or not."""
    cls = float_class_of(module)
    row = next(row for row in map(ROWS.__getitem__, ROWS) if row.module == cls.__name__)
    functions = (
        f for f in row.functions if getattr(f, "__module__", None) != operator.__name__
    )
    return cast("Callable[..., Any]", next(functions))


def stand_in(cls: type[nn.Module]) -> nn.Module:
    """Return a module that computes what its function does, called with the same arguments."""
    # torch.cat has another default than its module.
    return Cat(0) if cls is Cat else cls()


class QuantBinary(QuantModule):
    """Base of operators with two operands, each with its own range if it is a floating tensor."""

    input_slots = ("input", "other")
    weight_slots = ()

    other_quantizer: nn.Module

    def forward(self, input: Any, other: Any) -> Tensor:
        """Return what the operator gives for the quantized operands."""
        result: Tensor = super().forward(
            _quantized(self.input_quantizer, input),
            _quantized(self.other_quantizer, other),
        )
        return result


def _quantized(quantizer: nn.Module, value: object) -> Any:
    return (
        quantizer(value)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
    )


class Call(nn.Module):
    """Place of one function call in the forward of its parent; it is never called itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise QuantizationError: the parent makes the call."""
        raise QuantizationError(
            f"{type(self).__name__}: was called; expected its parent to make the call. "
            "It only holds the quantizers of a function call"
        )


@register(Call)
class QuantCall(QuantModule, Call):
    """:class:`Call` with the quantizers of the input and of the weight, which is the parent's."""

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield nothing: see the parent."""
        return iter(())


@register(Add)
class QuantAdd(QuantBinary, Add):
    """:class:`Add` of quantized operands, each with its own range.

    Example:
        >>> add = torchq.nn.QuantAdd()
        >>> add.input_quantizer.set_amax(127.0)
        >>> add.other_quantizer.set_amax(12.7)
        >>> add(torch.tensor([1.4]), torch.tensor([0.24]))
        tensor([1.2000])
    """

    def forward(self, input: Any, other: Any) -> Tensor:
        """Return the sum of the quantized operands."""
        result = integer_sum(self, input, other)
        return super().forward(input, other) if result is None else result


@register(Mul)
class QuantMul(QuantBinary, Mul):
    """:class:`Mul` of quantized operands, each with its own range."""

    def forward(self, input: Any, other: Any) -> Tensor:
        """Return the product of the quantized operands."""
        result = integer_multiplication(self, input, other)
        return super().forward(input, other) if result is None else result


@register(MatMul)
class QuantMatMul(QuantBinary, MatMul):
    """:class:`MatMul` of quantized operands, each with its own range."""

    gives_float_results = True
    factor_slots = ("input", "other")

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Return the matrix product of the quantized operands."""
        factors = (self.input_quantizer, input), (self.other_quantizer, other)
        result = None
        if self.integer_kernel is not None:
            to = self.integer_kernel.result if self.rounded_by else None
            result = integer_matmul(self, factors, to=to)
        return super().forward(input, other) if result is None else result


@register(Maximum)
class QuantMaximum(QuantBinary, Maximum):
    """:class:`Maximum` of quantized operands, each with its own range."""


@register(Cat)
class QuantCat(QuantModule, Cat):
    """:class:`Cat` of tensors that share one range, so that a runtime can concatenate their codes.

    The one ``input_quantizer`` sees every tensor. With several ranges it sees the first one, and
    ``input1_quantizer``, ``input2_quantizer``, ... the others.
    """

    weight_slots = ()

    def quantizer_of(self, index: int) -> nn.Module:
        """Return the quantizer of the tensor at ``index``."""
        is_first = not 0 < index < self.ranges
        return (
            self.input_quantizer
            if is_first
            else self.get_submodule(f"input{index}_quantizer")
        )

    def on_convert(self) -> None:
        """Add the quantizers of the tensors behind the first one."""
        self.separate_ranges_(self.ranges)

    def on_revert(self) -> None:
        """Remove them."""
        for index in range(1, self.ranges):
            delattr(self, f"input{index}_quantizer")

    def separate_ranges_(self, ranges: int) -> None:
        """Give each of the first ``ranges`` tensors a range of its own, which is not calibrated."""
        self.ranges = ranges
        for index in range(1, ranges):
            quantizer: nn.Module = nn.Identity()
            if isinstance(self.input_quantizer, TensorQuantizer):
                quantizer = TensorQuantizer(
                    self.input_quantizer.given_descriptor,
                    device=self.input_quantizer.amax.device,
                )
                quantizer.mode = self.input_quantizer.mode
            self.add_module(f"input{index}_quantizer", quantizer.train(self.training))

    def forward(self, tensors: Sequence[Tensor], dim: int | None = None) -> Tensor:
        """Return the concatenation of the quantized tensors."""
        quantized = [_quantized(self.quantizer_of(i), t) for i, t in enumerate(tensors)]
        return super().forward(quantized, dim)


@register(Tap)
class QuantTap(InputQuantized, Tap):
    """:class:`Tap` that returns its input quantized."""

    def on_integers(
        self,
        name: str,
        function: Callable[[Tensor], Tensor],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> Tensor | None:
        """Return what the function behind this place gives, as an integer kernel computes it.

        Args:
            name: the :attr:`torchq.graph.Operator.name` of the function.
            function: computes it of the quantized operand.
            arguments: the positional ones, the operand first.
            options: those by name.

        Returns:
            None where this place quantizes the operand and no more: where the kernels of the
            target compute the function in float, or a hook watches.
        """
        x = arguments[0]
        is_watched = bool(self._forward_hooks or self._forward_pre_hooks)
        if self.integer_kernel is None or is_watched or not are_plain_numbers(x):
            return None
        if name == "sigmoid":
            return integer_sigmoid(self, x)
        windows = windows_of_call(name, arguments[1:], options, x.shape)
        return integer_average(self, x, windows, function)
