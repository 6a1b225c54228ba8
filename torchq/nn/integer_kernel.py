"""What the integer kernel of a layer computes, to the last bit, in place of the simulation.

Products of codes are whole numbers, which float32 adds exactly below 2**24, in any order. So a
layer that its plan gives to an integer kernel multiplies codes, and rounds the sums as the formulas
of the runtime say: :class:`torchq.runtime.Arithmetic`. It does so in eval mode and without
gradients, on a CPU, in float32; everything else simulates, in particular whatever records calls
(``torch.compile``, ``torch.export``, ONNX), autocast, and quantizers that are off, observe, have a
delegate or a range of each call.

What does not depend on the input is made when ranges or weights change. Whether a float kernel
adds exactly is never assumed: at each new shape the results of one sample are compared with those
of float64, and float64 takes its place where they differ.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeAlias, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.formats import IntFormat
from torchq.functional import CodeGrid, QParams
from torchq.functional.kernels.tiled import tiles
from torchq.functional.windows import Windows
from torchq.nn.integer_bias import exceeds, kernel_bias, raises_step
from torchq.nn.kept_numbers import KeptNumbers, are_plain_numbers
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.nn.weight_grid import scale_weight_
from torchq.runtime import (
    RUNTIMES,
    Arithmetic,
    LayerNumbers,
    ValuesProduct,
    planned_target,
)

T = TypeVar("T")
_logger = logging.getLogger(__name__)

#: Whole numbers below are exact in float32, and so are all of their sums below.
_EXACT = 2.0**24
_BYTE = 8
#: Shapes of which a layer remembers whether its kernel is exact.
_MOST_SHAPES = 256
#: Rows of a linear layer that are compared with float64.
_ROWS = 4

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

#: ``multiply(x, weight, bias)``: what a layer of torch computes of them.
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class IntegerKernel:
    """The kernel that a plan gives a layer to, and the numbers of it that were made.

    Args:
        runtime: the name of the runtime.
        result: the quantizer that the kernel rounds for; None where its result is float. It is the
            child of another module, so it is not kept alive: a layer whose reader is gone
            simulates. A copy of a model has that of the copy.
    """

    __slots__ = ("_arithmetic", "_numbers", "_result", "runtime")

    def __init__(self, runtime: str, result: TensorQuantizer | None = None) -> None:
        self.runtime = runtime
        self._result = None if result is None else weakref.ref(result)
        self._numbers: dict[str, KeptNumbers[object]] = {}
        self._arithmetic: Arithmetic | None = None

    @property
    def result(self) -> TensorQuantizer | None:
        """The quantizer that the kernel rounds for, if it is still there.

        None too where it multiplies by factors first: the kernel in front gives floats then, but
        for :meth:`factors_for`.
        """
        quantizer = self.reader
        has_factors = quantizer is not None and quantizer.pre_quant_scale is not None
        return None if has_factors else quantizer

    def factors_for(self, layer: Any) -> Tensor | None:
        """Return what the reader multiplies channels by, where files have that in this layer.

        These are powers of two of the channels of images, (channels, 1, ...): see
        :mod:`torchq.swap.even_channels`.
        """
        quantizer = self.reader
        factors = None if quantizer is None else quantizer.pre_quant_scale
        if (
            factors is None
            or not layer.rounded_by
            or not isinstance(layer, _CONVOLUTIONS)
        ):
            return None
        is_of_images = factors.dim() == layer.weight.dim() - 1
        return factors if is_of_images and len(factors) == layer.out_channels else None

    @property
    def knows_float_results(self) -> bool:
        """True if the formulas of layers with float results are known, of convolutions too."""
        arithmetic = self.arithmetic
        if arithmetic is None:
            return False
        return arithmetic.values_product is not None or arithmetic.finishes is not None

    @property
    def reader(self) -> TensorQuantizer | None:
        """The quantizer of the result, whatever it does with it."""
        return None if self._result is None else self._result()

    @property
    def arithmetic(self) -> Arithmetic | None:
        """The formulas of the runtime."""
        if self._arithmetic is None:  # each call reads it
            runtime = RUNTIMES.get(self.runtime)
            self._arithmetic = None if runtime is None else runtime.arithmetic
        return self._arithmetic

    def codes(self, grid: CodeGrid, x: Tensor) -> Tensor:
        """Return the codes of values less the zero point, as kernels in front of it make them."""
        arithmetic = self.arithmetic
        divides = arithmetic is None or arithmetic.divides
        return grid.codes(x, by_reciprocal=not divides)

    def __deepcopy__(self, memo: dict[int, object]) -> IntegerKernel:
        return type(self)(self.runtime, copy.deepcopy(self.reader, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.runtime, self.reader)

    def kept(
        self,
        settings: tuple[object, ...],
        tensors: tuple[Tensor | None, ...],
        make: Any,
        place: str = "",
    ) -> Any:
        """Return what ``make`` gives for the formulas, again where settings or numbers change.

        ``place`` tells apart what a module multiplies at several places.
        """

        def made() -> object:
            arithmetic = self.arithmetic
            if arithmetic is None:
                return None
            with torch.inference_mode(False), torch.no_grad():
                return make(arithmetic)

        numbers = self._numbers.get(place)
        if numbers is None:
            numbers = self._numbers.setdefault(place, KeptNumbers())
        return numbers.get(settings, tensors, made)

    def of_grids(
        self, grids: tuple[CodeGrid, ...], make: Callable[..., T], place: str = ""
    ) -> T | None:
        """Return ``make(arithmetic, *qparams)``, kept as long as the grids stay the same."""
        qparams = [grid.qparams for grid in grids]
        made: T | None = self.kept(
            grids, (), lambda arithmetic: make(arithmetic, *qparams), place
        )
        return made


@contextmanager
def kernels_off(model: nn.Module) -> Iterator[None]:
    """Let layers simulate what they compute on integers, inside a ``with`` block.

    A layer that rounds as its kernel does rounds for the quantizer of another module, whatever
    that module does with it.
    """
    with_kernels = [m for m in model.modules() if vars(m).get("integer_kernel")]
    kernels = [vars(module)["integer_kernel"] for module in with_kernels]
    try:
        for module in with_kernels:
            vars(module)["integer_kernel"] = None
        yield
    finally:
        for module, kernel in zip(with_kernels, kernels, strict=True):
            vars(module)["integer_kernel"] = kernel


def evaluation_line(runtime: str, *, on_integers: bool) -> str:
    """Return what a forward in eval mode, without gradients, computes, for reports."""
    does = f"computes the codes of {runtime}" if on_integers else "simulates"
    return f"evaluation {does}"


def evaluation_of(model: nn.Module) -> str:
    """Return :func:`evaluation_line` of a model; "" where it was planned for no runtime."""
    is_computed: dict[str, bool] = {}
    for module in model.modules():
        kernel = getattr(module, "integer_kernel", None)
        if isinstance(kernel, IntegerKernel) and kernel.arithmetic is not None:
            before = is_computed.get(kernel.runtime, False)
            is_computed[kernel.runtime] = before or _has_kernel(module)
    target = planned_target(model)
    if not is_computed and target is not None:
        is_computed[target] = False
    lines = (
        evaluation_line(name, on_integers=computed)
        for name, computed in is_computed.items()
    )
    return "; ".join(lines)


def _has_kernel(module: nn.Module) -> bool:
    """Return True for a module whose result, or whose products, an integer kernel computes."""
    if module.rounded_by:
        return True
    quantizer = getattr(module, "input_quantizer", None)
    reads_codes = isinstance(quantizer, TensorQuantizer)
    return reads_codes and getattr(module, "gives_float_results", False)


class SimulatedProduct(nn.Module):
    """Mixin of layers that multiply a quantized input and a quantized weight."""

    #: True where kernels may leave results in float: codes are multiplied all the same.
    gives_float_results: ClassVar[bool] = False

    def simulated(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply
    ) -> Tensor:
        """Return the result of a layer for the values of its codes."""
        layer: Any = self
        bias = kernel_bias(layer, layer.corrected_bias(bias))
        return multiply(x, layer.corrected_weight(weight), bias)

    def by_output(self, weight: Tensor) -> Tensor:
        """Return a weight of this layer as (out, in, ...), or the other way round."""
        layer: Any = self
        return weight.transpose(0, 1) if layer.channel_axis else weight


# --- products -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Product:
    """The numbers of a layer with a weight.

    Attributes:
        sums: adds the products of codes.
        finish: makes values of the sums, in place.
    """

    sums: _Sums
    finish: Callable[[Tensor], Tensor]

    def __call__(self, codes: Tensor, multiply: Multiply) -> Tensor:
        return self.finish(self.sums(codes, multiply))


@dataclass(frozen=True, eq=False)
class _ValuesProduct:
    """The numbers of a layer with a weight whose kernel multiplies values of codes, in float.

    Attributes:
        scale: that of the input.
        weight: its values, (out, in / groups, ...).
        bias: (out,), or None.
        product: the formula of the runtime.
    """

    scale: Tensor
    weight: Tensor
    bias: Tensor | None
    product: ValuesProduct

    def __call__(self, codes: Tensor, multiply: Multiply) -> Tensor:
        return self.product(codes.mul_(self.scale), self.weight, self.bias, multiply)


_AnyProduct: TypeAlias = _Product | _ValuesProduct


def integer_product(layer: Any, x: Tensor, multiply: Multiply) -> Tensor | None:
    """Return the result of a layer with a weight as its integer kernel computes it.

    Args:
        layer: a quantized convolution or linear layer.
        x: its input.
        multiply: computes the float layer, of a weight as (out, in, ...).

    Returns:
        Values of codes, not clamped to the ends of their type; None where the layer simulates.
    """
    kernel: IntegerKernel | None = layer.integer_kernel
    if kernel is None or layer.training or not are_plain_numbers(x):
        return None
    of_input, of_weight = layer.input_quantizer, layer.weight_quantizer
    if not (
        isinstance(of_input, TensorQuantizer) and isinstance(of_weight, TensorQuantizer)
    ):
        return None
    grid = of_input.fixed_grid()
    product = None if grid is None else _product_of(layer, kernel, grid)
    if grid is None or product is None:
        return None
    codes = _codes(kernel, of_input, grid, x)
    weight = _weight_as_called(of_weight, layer.weight)
    if isinstance(codes, Tensor) and weight is None:
        result = product(codes, multiply)
        factors = kernel.factors_for(layer)
        # Exact, as they are powers of two; what reads the result multiplies it by them.
        return result if factors is None else result / factors.to(result.dtype)
    # A hook has changed what a quantizer returns.
    if weight is None:
        weight = _plain_weight(of_weight, layer.weight)
    simulated: Tensor = layer.simulated(
        _values(codes, grid),
        weight,
        layer.bias,
        lambda x, weight, bias: multiply(x, layer.by_output(weight), bias),
    )
    return simulated


@dataclass(frozen=True, eq=False)
class _OffTheGrid:
    """Values that a hook made of those of a quantizer."""

    values: Tensor


def _codes(
    kernel: IntegerKernel, quantizer: TensorQuantizer, grid: CodeGrid, x: Tensor
) -> Tensor | _OffTheGrid:
    """Return the codes of an input; hooks of the quantizer see its call, and may change it."""
    if not _is_watched(quantizer):
        factors = quantizer.pre_quant_scale
        scaled = x if factors is None else x * factors.to(x.dtype)
        return kernel.codes(grid, scaled)
    values = quantizer(x)
    codes = grid.codes_of_values(values)
    return _OffTheGrid(values) if codes is None else codes


def _is_watched(quantizer: nn.Module) -> bool:
    """Return True if more than the quantizer itself takes part in a call of it."""
    hooks = quantizer._forward_hooks or quantizer._forward_pre_hooks
    return bool(hooks) or "forward" in vars(quantizer)


def _weight_as_called(quantizer: TensorQuantizer, weight: Tensor) -> Tensor | None:
    """Return the quantized weight where a hook that sees the call changes it; else None."""
    if not _is_watched(quantizer):
        return None
    values: Tensor = quantizer(weight)
    return None if torch.equal(values, _plain_weight(quantizer, weight)) else values


def _plain_weight(quantizer: TensorQuantizer, weight: Tensor) -> Tensor:
    """Return the quantized weight without a call of the quantizer."""
    return quantizer.qparams().dequantize(quantizer.codes(quantizer.scaled(weight)))


def _product_of(
    layer: Any, kernel: IntegerKernel, grid: CodeGrid
) -> _AnyProduct | None:
    """Return the numbers of a layer as its ranges and weights are now; None if it simulates."""
    quantizer = layer.weight_quantizer
    gives_float = layer.gives_float_results or kernel.knows_float_results
    factors = kernel.factors_for(layer)
    to = _grid_of_result(
        layer, kernel, gives_float=gives_float, has_factors=factors is not None
    )
    if not _is_on(quantizer) or isinstance(to, _Simulated):
        return None
    if not layer.weight.is_cpu:  # nor can be the others
        return None
    marks = layer.bias_format, layer.after_fold, layer.from_zero
    settings = (grid, to, quantizer.descriptor, *marks)
    tensors = (
        layer.weight,
        layer.bias,
        *_numbers_of(quantizer),
        layer.output_gain,
        layer.output_shift,
        factors,
    )
    product: _AnyProduct | None
    product = kernel.kept(
        settings,
        tensors,
        lambda arithmetic: _made(layer, arithmetic, grid, to, factors),
    )
    return product


class _Simulated:
    """Stands for the grid of a result that no kernel computes."""


def _grid_of_result(
    module: nn.Module,
    kernel: IntegerKernel,
    *,
    gives_float: bool,
    has_factors: bool = False,
) -> CodeGrid | _Simulated | None:
    """Return the grid that a kernel rounds results to; None where they are float."""
    result = kernel.reader if has_factors else kernel.result
    if module.rounded_by:
        to = None if result is None else result.fixed_grid()
        return _Simulated() if to is None else to
    return None if gives_float else _Simulated()


def _is_on(quantizer: TensorQuantizer) -> bool:
    """Return True for a quantizer of a weight that quantizes as it is calibrated."""
    return (
        quantizer.quantizing and not quantizer.observing and quantizer.delegate is None
    )


def _numbers_of(quantizer: TensorQuantizer) -> tuple[Tensor | None, ...]:
    """Return the tensors that the codes of a weight depend on, beside the weight."""
    return (
        quantizer.amax,
        quantizer._buffers.get("held_scale"),
        quantizer.pre_quant_scale,
    )


def _made(
    layer: Any,
    arithmetic: Arithmetic,
    grid: CodeGrid,
    to: CodeGrid | None,
    factors: Tensor | None,
) -> _AnyProduct | None:
    """Return the numbers of a layer, made of its ranges and weights."""
    if any(layer.after_fold) or not _has_whole_weights(layer.weight_quantizer):
        return None
    quantizer, weight, bias = _with_correction(layer)
    if factors is not None:
        per_output = factors.flatten()
        quantizer = copy.deepcopy(quantizer)
        factor = layer.per_weight(per_output.double())
        weight = scale_weight_(quantizer, weight, factor).values
        bias = None if bias is None else bias * per_output.to(bias)
    if bool(raises_step(layer, bias).any()):
        return None  # The file rounds the weight to another scale.
    is_transposed = bool(layer.channel_axis)
    if is_transposed and (to is None or layer.groups > 1):
        return None
    return _product(
        arithmetic,
        (grid, to),
        quantizer,
        weight,
        bias,
        is_transposed=is_transposed,
        from_zero=layer.from_zero,
    )


def _product(
    arithmetic: Arithmetic,
    grids: tuple[CodeGrid, CodeGrid | None],
    quantizer: TensorQuantizer,
    weight: Tensor,
    bias: Tensor | None,
    *,
    is_transposed: bool = False,
    from_zero: tuple[str, ...] = (),
) -> _AnyProduct | None:
    """Return the numbers of a product with a weight; None where kernels have none of its codes.

    Args:
        arithmetic: the formulas.
        grids: of the input, and of the result; None for a float result.
        quantizer: of the weight.
        weight: its values, (out, in, ...).
        bias: (out,), or None.
        is_transposed: the weight is (in, out, ...).
        from_zero: see :class:`torchq.runtime.LayerNumbers`.
    """
    grid, to = grids
    is_float = weight.dtype is not torch.float32
    if is_float or not _fits_kernels(grid) or bool(quantizer.dead_ranges().any()):
        return None
    # Products with an input divided by factors are those without any, up to the rounding.
    codes = quantizer.codes(quantizer.scaled(weight))
    if is_transposed:
        codes = codes.transpose(0, 1).contiguous()
    step = grid.scale * quantizer.qparams().scale.flatten()
    if len(step) not in (1, len(codes)) or not bool(codes.isfinite().all()):
        return None
    weight_scale = quantizer.qparams().scale.flatten()
    if arithmetic.finishes is not None:
        scale = weight_scale.expand(len(codes))
        result = None if to is None else to.qparams
        numbers = LayerNumbers(grid.qparams, codes, scale, bias, result, from_zero)
        return _Product(_Sums(codes, None, grid), arithmetic.finishes(numbers))
    if to is None and arithmetic.values_product is not None:
        shape = (-1, *[1] * (codes.dim() - 1))
        values = codes * weight_scale.view(shape)
        return _ValuesProduct(grid.scale, values, bias, arithmetic.values_product)
    step = step.expand(len(codes))
    if to is None:
        if arithmetic.float_products is None:
            return None
        return _Product(_Sums(codes, None, grid), arithmetic.float_products(step, bias))
    formulas = arithmetic.code_biases
    if formulas is None:
        return None
    bias_codes = None if bias is None else formulas.bias_codes(bias, step)
    finish = formulas.rounds_products(_by_channel(step, codes), to.scale)
    return _Product(_Sums(codes, bias_codes, grid), finish)


def _fits_kernels(grid: CodeGrid) -> bool:
    """Return True for codes of at most a byte; kernels take no others."""
    return grid.qparams.format.bits <= _BYTE


def _has_whole_weights(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    is_plain = type(quantizer) is TensorQuantizer
    is_fixed = quantizer.calibrated and not d.dynamic and d.fake_quant
    is_whole = (
        isinstance(d.format, IntFormat) and d.format.bits <= _BYTE and d.symmetric
    )
    return is_plain and is_fixed and is_whole and d.block_size is None


def integer_call(
    holder: Any, operands: CallOperands, multiply: Multiply, place: str
) -> Tensor | None:
    """Return the result of a call with a weight as an integer kernel computes it.

    Args:
        holder: has the quantizers of the input and of the weight.
        operands: what the call multiplies.
        multiply: computes the call of input, weight and bias, the weight being (out, in, ...).
        place: where the call is in the code of the module around it.

    Returns:
        Values of codes, not clamped to the ends of their type; None where the call is simulated.
    """
    kernel: IntegerKernel | None = holder.integer_kernel
    if kernel is None or not are_plain_numbers(operands.input):
        return None
    to = _grid_of_result(holder, kernel, gives_float=operands.gives_float)
    if isinstance(to, _Simulated):
        return None
    quantizers = holder.input_quantizer, holder.weight_quantizer
    return _weighted(holder, quantizers, operands, multiply, (to, place))


def integer_projection(
    layer: object,
    quantizers: tuple[object, object],
    operands: CallOperands,
    place: str,
) -> Tensor | None:
    """Return ``x @ weight.T + bias`` as an integer kernel with a float result computes it.

    Args:
        layer: multiplies them.
        quantizers: those of the input and of the weight.
        operands: what is multiplied.
        place: tells apart the products of a layer.

    Returns:
        None where the layer simulates.
    """
    return _weighted(layer, quantizers, operands, F.linear, (None, place))


def _weighted(
    module: Any,
    quantizers: tuple[object, object],
    operands: CallOperands,
    multiply: Multiply,
    result: tuple[CodeGrid | None, str],
) -> Tensor | None:
    """Return a product with a weight, for the grid of its result and its place in a module."""
    kernel: IntegerKernel | None = module.integer_kernel
    x, weight, bias = operands.input, operands.weight, operands.bias
    if kernel is None or module.training or not are_plain_numbers(x):
        return None
    of_input, of_weight = quantizers
    if not (_is_unwatched(of_input) and _is_unwatched(of_weight)):
        return None
    grid = of_input.fixed_grid()
    if grid is None or not _is_on(of_weight):
        return None
    to, place = result
    if not weight.is_cpu or not _has_whole_weights(of_weight):
        return None

    def make(arithmetic: Arithmetic) -> _AnyProduct | None:
        grids = (grid, to)
        is_transposed = operands.is_transposed
        made = _product(
            arithmetic, grids, of_weight, weight, bias, is_transposed=is_transposed
        )
        step = grid.scale * of_weight.qparams().scale.flatten()
        is_raised = bias is not None and to is not None and exceeds(bias, step)
        return None if is_raised else made

    settings = (grid, to, of_weight.descriptor)
    tensors = (weight, bias, *_numbers_of(of_weight))
    product: _AnyProduct | None = kernel.kept(settings, tensors, make, place)
    if product is None:
        return None
    codes = _codes(kernel, of_input, grid, x)
    assert isinstance(codes, Tensor)
    return product(codes, multiply)


@dataclass(frozen=True, eq=False)
class CallOperands:
    """What a call with a weight multiplies.

    Attributes:
        input: (N, ..., in), or a batch of images.
        weight: (out, in, ...); (in, out) where it is transposed.
        bias: (out,), or None.
        is_transposed: see ``weight``.
        gives_float: kernels may leave results in float.
    """

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    is_transposed: bool
    gives_float: bool


def _is_unwatched(quantizer: object) -> TypeGuard[TensorQuantizer]:
    return isinstance(quantizer, TensorQuantizer) and not _is_watched(quantizer)


def _with_correction(layer: Any) -> tuple[TensorQuantizer, Tensor, Tensor | None]:
    """Return quantizer, weight and bias as a file has them: gain and shift are folded in."""
    quantizer: TensorQuantizer = layer.weight_quantizer
    weight: Tensor = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    if layer.is_corrected and bias is not None:
        bias = bias + layer.output_shift
        if layer.output_gain.numel():
            quantizer = copy.deepcopy(quantizer)
            factor = layer.per_weight(layer.output_gain.double())
            weight = scale_weight_(quantizer, weight, factor).values
    return quantizer, weight, bias


def _by_channel(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return one number per output channel as it broadcasts against the result of a layer."""
    spatial_dims = [1] * (weight.dim() - 2)
    return numbers.view(-1, *spatial_dims)


class _Sums:
    """Adds products of codes exactly: in float32, in parts, or in float64.

    Args:
        weight: the codes of a weight, (out, in / groups, ...).
        bias: whole numbers, (out,).
        grid: of the input.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, grid: CodeGrid) -> None:
        self._weight, self._bias = weight, bias
        self._checked = _CheckedShapes()
        self._parts = _parts(weight, bias, grid)

    def __call__(self, codes: Tensor, multiply: Multiply) -> Tensor:
        """Return ``float(sum)`` of codes, in a new float32 tensor."""
        if not self._parts:
            return self._in_float64(codes, multiply)
        key = _conditions(codes)
        is_exact = self._checked.get(key)
        if is_exact is False:
            return self._in_float64(codes, multiply)
        sums = self._in_float32(codes, multiply)
        if is_exact is None:
            is_exact = self._agrees(codes, sums, multiply)
            self._checked.remember(key, is_exact)
        return sums if is_exact else self._in_float64(codes, multiply)

    def _in_float32(self, codes: Tensor, multiply: Multiply) -> Tensor:
        if len(self._parts) == 1:
            return multiply(codes, self._weight, self._bias)
        axis = 1 - self._weight.dim()  # of the channels of the input
        pieces = codes.split([part.shape[1] for part in self._parts], axis)
        total = None
        for piece, part in zip(pieces, self._parts, strict=True):
            sums = multiply(piece, part, None).double()
            total = sums if total is None else total.add_(sums)
        assert total is not None
        if self._bias is not None:
            total += _by_channel(self._bias.double(), self._weight)
        return total.float()

    def _in_float64(self, codes: Tensor, multiply: Multiply) -> Tensor:
        bias = None if self._bias is None else self._bias.double()
        return multiply(codes.double(), self._weight.double(), bias).float()

    def _agrees(self, codes: Tensor, sums: Tensor, multiply: Multiply) -> bool:
        """Return True if sums are whole numbers, and those of one sample are those of float64."""
        if not torch.equal(sums, sums.round()):  # as Winograd's kernels give them
            return False
        dims = self._weight.dim()
        if dims == 2:  # a linear layer: some rows
            codes, sums = (
                codes.reshape(-1, codes.shape[-1]),
                sums.reshape(-1, sums.shape[-1]),
            )
            codes, sums = codes[:_ROWS], sums[:_ROWS]
        elif codes.dim() == dims:
            codes, sums = codes[:1], sums[:1]
        return torch.equal(self._in_float64(codes, multiply), sums)


def _conditions(codes: Tensor) -> tuple[object, ...]:
    """Return what torch chooses a kernel by, beside the shape of the weight."""
    settings = torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    return codes.shape, codes.stride(), torch.get_num_threads(), *settings


def _parts(weight: Tensor, bias: Tensor | None, grid: CodeGrid) -> tuple[Tensor, ...]:
    """Return the weight in parts along its input channels whose sums float32 holds exactly.

    Nothing where one channel alone may be too large.
    """
    # (out, in): the most that the products of one input channel add up to, in either direction.
    flat = (
        weight.flatten(2).double() if weight.dim() > 2 else weight.double()[..., None]
    )
    positive = flat.clamp_min(0).sum(2)
    negative = flat.clamp_max(0).sum(2).neg_()
    upper = positive * grid.high - negative * grid.low
    lower = negative * grid.high - positive * grid.low
    most = torch.maximum(upper, lower)
    nothing = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    of_bias = nothing if bias is None else bias.abs().double()
    if float((torch.maximum(upper.sum(1), lower.sum(1)) + of_bias).max()) < _EXACT:
        return (weight,)
    sizes: list[int] = []
    total = nothing
    for channel in most.T:
        if float(channel.max()) >= _EXACT:
            return ()
        if not sizes or float((total + channel).max()) >= _EXACT:
            sizes.append(0)
            total = torch.zeros_like(total)
        sizes[-1] += 1
        total = total + channel
    return tuple(part.contiguous() for part in weight.split(sizes, 1))


# --- two tensors --------------------------------------------------------------------------------


def integer_sum(layer: Any, first: Any, second: Any) -> Tensor | None:
    """Return the sum of two tensors as the integer kernel of a layer computes it.

    Returns:
        Values of codes, not clamped to the ends of their type; None where the layer simulates.
    """
    pair = _pair_of_codes(layer, first, second)
    if pair is None:
        return None
    kernel, grids = pair
    formulas = kernel.of_grids(grids, _sum_formulas)
    if formulas is None:
        return None
    x, y = _codes_of_pair(layer, grids, first, second)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _values(x, grids[0]) + _values(y, grids[1])
    add, add_exchanged = formulas
    if first.shape != second.shape:
        shape = torch.broadcast_shapes(x.shape, y.shape)
        if _is_repeated_last(x, y):
            x, y, add = y, x, add_exchanged
        # Both are written to.
        x = x.expand(shape).clone()
        y = y.expand(shape).clone()
    for part, other in tiles(x, y):
        add(part, other).mul_(grids[2].scale)
    return x


def _sum_formulas(
    arithmetic: Arithmetic, first: QParams, second: QParams, to: QParams
) -> (
    tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]] | None
):
    """Return how two tensors are added, and how they are with the operands exchanged."""
    formulas = arithmetic.operators
    if formulas is None:
        return None
    return formulas.adds(first, second, to), formulas.adds(second, first, to)


def _is_repeated_last(x: Tensor, y: Tensor) -> bool:
    """Return True if one element of ``x`` stands beside several of ``y`` in memory.

    A kernel takes the single number as its second operand, whichever it is.
    """
    lengths = zip(reversed(x.shape), reversed(y.shape), strict=False)
    for of_x, of_y in lengths:
        if of_x != of_y:
            return of_x == 1
        if of_x > 1:
            return False
    return x.dim() < y.dim()


def integer_multiplication(layer: Any, first: Any, second: Any) -> Tensor | None:
    """Return the product of two tensors, element by element; see :func:`integer_sum`."""
    pair = _pair_of_codes(layer, first, second)
    if pair is None:
        return None
    kernel, grids = pair
    scaled = kernel.of_grids(grids, _product_formula)
    if scaled is None:
        return None
    x, y = _codes_of_pair(layer, grids, first, second)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _values(x, grids[0]) * _values(y, grids[1])
    products = x.mul_(y) if x.shape == y.shape else x * y
    return _in_tiles(products, scaled, grids[2])


def _product_formula(
    arithmetic: Arithmetic, first: QParams, second: QParams, to: QParams
) -> Callable[[Tensor], Tensor] | None:
    formulas = arithmetic.operators
    return None if formulas is None else formulas.multiplies(first, second, to)


def integer_matmul(
    layer: Any,
    factors: tuple[tuple[Any, Any], tuple[Any, Any]],
    place: str = "",
    *,
    to: Any = None,
) -> Tensor | None:
    """Return the matrix product of two tensors, as :func:`torch.matmul` defines it.

    Args:
        layer: multiplies them.
        factors: the quantizer of each, and what it reads.
        place: tells apart the products of a layer.
        to: the quantizer of the result; None leaves it in float.

    Returns:
        Values; where the result is quantized those of codes, not clamped to the ends of their type.
        None where the layer simulates.
    """
    kernel: IntegerKernel | None = layer.integer_kernel
    (of_first, first), (of_second, second) = factors
    if kernel is None or layer.training:
        return None
    if not (are_plain_numbers(first) and are_plain_numbers(second)):
        return None
    if not (_is_unwatched(of_first) and _is_unwatched(of_second)):
        return None
    quantizers = (of_first, of_second, *(() if to is None else (to,)))
    grids = _grids(*quantizers)
    if grids is None or not all(map(_fits_kernels, grids)):
        return None
    matmul = kernel.of_grids(grids, _matmul, place)
    if matmul is None:
        return None
    x = _codes(kernel, of_first, grids[0], first)
    y = _codes(kernel, of_second, grids[1], second)
    assert isinstance(x, Tensor) and isinstance(y, Tensor)
    return matmul(x, y)


def _matmul(
    arithmetic: Arithmetic, first: QParams, second: QParams, to: QParams | None = None
) -> Callable[[Tensor, Tensor], Tensor] | None:
    step = first.scale.reshape(()) * second.scale.reshape(())
    if not arithmetic.multiplies_matrices:
        return None
    if to is None:
        if arithmetic.float_products is None:
            return None
        finish = arithmetic.float_products(step, None)
    else:
        if arithmetic.code_biases is None:
            return None
        to_scale = to.scale.reshape(())
        finish = arithmetic.code_biases.rounds_products(step, to_scale)
    largest = CodeGrid.of(first).largest * CodeGrid.of(second).largest
    add = _MatrixSums(largest)
    return lambda x, y: finish(add(x, y))


class _MatrixSums:
    """Adds products of the codes of two matrices exactly: in float32, in parts, or in float64.

    Args:
        largest: the largest magnitude of a product of two codes.
    """

    def __init__(self, largest: float) -> None:
        self._most = int((_EXACT - 1) // max(largest, 1.0))
        self._checked = _CheckedShapes()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        key = _conditions(x), _conditions(y)
        is_exact = self._checked.get(key)
        if is_exact is False:
            return self._in_float64(x, y)
        sums = self._in_float32(x, y)
        if is_exact is None:
            is_exact = torch.equal(sums, self._in_float64(x, y)) or bool(
                sums.isnan().any()
            )
            self._checked.remember(key, is_exact)
        return sums if is_exact else self._in_float64(x, y)

    def _in_float32(self, x: Tensor, y: Tensor) -> Tensor:
        if x.shape[-1] <= self._most:
            return x @ y
        axis = -1 if y.dim() == 1 else -2
        pieces = zip(x.split(self._most, -1), y.split(self._most, axis), strict=True)
        total: Tensor | None = None
        for part, other in pieces:
            sums = (part @ other).double()
            total = sums if total is None else total.add_(sums)
        assert total is not None
        return total.float()

    def _in_float64(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.double() @ y.double()).float()


class _CheckedShapes:
    """Remembers at which shapes, and under which conditions, a float32 kernel adds exactly."""

    def __init__(self) -> None:
        self._is_exact: dict[object, bool] = {}

    def get(self, key: object) -> bool | None:
        """Return whether it does; None where it was not tried."""
        return self._is_exact.get(key)

    def remember(self, key: Any, is_exact: bool) -> None:
        """Keep what a comparison has shown."""
        if len(self._is_exact) >= _MOST_SHAPES:
            self._is_exact.clear()
        self._is_exact[key] = is_exact
        if not is_exact:
            _logger.info("float32 does not add %s exactly here: float64 does", key[0])


def _pair_of_codes(
    layer: Any, first: object, second: object
) -> tuple[IntegerKernel, tuple[CodeGrid, ...]] | None:
    """Return the kernel of two tensors, and the grids of both and of the result."""
    kernel: IntegerKernel | None = layer.integer_kernel
    if kernel is None or not layer.rounded_by or layer.training:
        return None
    if not (are_plain_numbers(first) and are_plain_numbers(second)):
        return None
    grids = _grids(layer.input_quantizer, layer.other_quantizer, kernel.result)
    return None if grids is None else (kernel, grids)


def _codes_of_pair(
    layer: Any, grids: tuple[CodeGrid, ...], first: Tensor, second: Tensor
) -> tuple[Tensor | _OffTheGrid, Tensor | _OffTheGrid]:
    kernel: IntegerKernel = layer.integer_kernel
    x = _codes(kernel, layer.input_quantizer, grids[0], first)
    y = _codes(kernel, layer.other_quantizer, grids[1], second)
    return x, y


def _in_tiles(
    numbers: Tensor, to_codes: Callable[[Tensor], Tensor], grid: CodeGrid
) -> Tensor:
    """Return the values of the codes that a function makes of whole numbers, both in place."""
    for (part,) in tiles(numbers):
        to_codes(part).mul_(grid.scale)
    return numbers


# --- functions of one tensor --------------------------------------------------------------------


def integer_average(
    layer: Any, x: Any, windows: Windows | None, pool: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return the means over windows of a batch of images, signals or volumes.

    Args:
        layer: an average pool, or what quantizes the operand of one.
        x: (N, C, ...).
        windows: those of the pool for ``x``; None for a pool that no kernel computes.
        pool: the float pool, for values that a hook has changed.

    Returns:
        Values of codes, not clamped to the ends of their type; None where the layer simulates.
    """
    one = None if windows is None else _one_of_codes(layer, x)
    if one is None or windows is None:
        return None
    kernel, grids = one
    of_windows = kernel.of_grids(grids, _averages)
    average = None if of_windows is None else of_windows(windows)
    if average is None:
        return None
    codes = _codes(kernel, layer.input_quantizer, grids[0], x)
    if not isinstance(codes, Tensor):
        return pool(codes.values)
    means = average(codes)
    return means if windows.keeps_dims else means.flatten(1)


def _averages(
    arithmetic: Arithmetic, of: QParams, to: QParams
) -> Callable[[Windows], Callable[[Tensor], Tensor] | None] | None:
    formulas = arithmetic.operators
    if formulas is None:
        return None
    return cache(lambda windows: formulas.averages(of, to, windows))


def integer_sigmoid(layer: Any, x: Any) -> Tensor | None:
    """Return the sigmoid of a tensor; see :func:`integer_mean`."""
    one = _one_of_codes(layer, x)
    if one is None:
        return None
    kernel, grids = one
    table = kernel.of_grids(grids, _sigmoid_table)
    if table is None:
        return None
    codes = _codes(kernel, layer.input_quantizer, grids[0], x)
    if not isinstance(codes, Tensor):
        return codes.values.sigmoid()
    return _looked_up(codes, table, grids[0]).mul_(grids[1].scale)


def _sigmoid_table(arithmetic: Arithmetic, of: QParams, to: QParams) -> Tensor | None:
    formulas = arithmetic.operators
    return None if formulas is None else formulas.sigmoid(of, to)


def integer_gated(layer: Any, x: Any) -> Tensor | None:
    """Return ``x * gate(sigmoid(x))``, both rounded to codes; see :func:`integer_mean`."""
    kernel: IntegerKernel | None = layer.integer_kernel
    if kernel is None or not layer.rounded_by or layer.training:
        return None
    of_input, of_gate = layer.input_quantizer, layer.gate_quantizer
    if not are_plain_numbers(x) or _is_watched(of_gate):
        return None
    grids = _grids(of_input, of_gate, kernel.result)
    formulas = None if grids is None else kernel.of_grids(grids, _gate_formulas)
    if grids is None or formulas is None:
        return None
    codes = _codes(kernel, of_input, grids[0], x)
    if not isinstance(codes, Tensor):
        result: Tensor | None = codes.values * of_gate(codes.values.sigmoid())
        return result
    table, scaled = formulas
    gates = _looked_up(codes, table, grids[0])
    return _in_tiles(gates.mul_(codes), scaled, grids[2])


def _gate_formulas(
    arithmetic: Arithmetic, of: QParams, gate: QParams, to: QParams
) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
    formulas = arithmetic.operators
    table = _sigmoid_table(arithmetic, of, gate)
    if formulas is None or table is None:
        return None
    return table, formulas.multiplies(of, gate, to)


def _looked_up(codes: Tensor, table: Tensor, of: CodeGrid) -> Tensor:
    """Return what a table has for each code, both less their zero points; NaN for NaN."""
    result = torch.empty_like(codes)
    with_nan = F.pad(table, (0, 1), value=torch.nan)
    for part, codes_part in tiles(result, codes):
        places = (codes_part - of.low).nan_to_num_(nan=len(table)).to(torch.int32)
        part.copy_(with_nan.index_select(0, places.flatten()).view(part.shape))
    return result


def _one_of_codes(
    layer: Any, x: object
) -> tuple[IntegerKernel, tuple[CodeGrid, ...]] | None:
    """Return the kernel of one tensor, and the grids of it and of the result."""
    kernel: IntegerKernel | None = layer.integer_kernel
    if kernel is None or not layer.rounded_by or layer.training:
        return None
    if not are_plain_numbers(x):
        return None
    grids = _grids(layer.input_quantizer, kernel.result)
    return None if grids is None else (kernel, grids)


def _grids(*quantizers: object) -> tuple[CodeGrid, ...] | None:
    """Return the grids of quantizers; None where one has none."""
    grids = []
    for quantizer in quantizers:
        grid = (
            quantizer.fixed_grid() if isinstance(quantizer, TensorQuantizer) else None
        )
        if grid is None:
            return None
        grids.append(grid)
    return tuple(grids)


def _values(operand: Tensor | _OffTheGrid, grid: CodeGrid) -> Tensor:
    return operand.mul_(grid.scale) if isinstance(operand, Tensor) else operand.values
