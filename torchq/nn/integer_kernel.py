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
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.formats import IntFormat
from torchq.functional import CodeGrid, QParams
from torchq.functional.kernels.tiled import tiles
from torchq.nn.integer_bias import kernel_bias, raises_step
from torchq.nn.kept_numbers import KeptNumbers, are_plain_numbers
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.nn.weight_grid import scale_weight_
from torchq.runtime import RUNTIMES, Arithmetic, planned_target

T = TypeVar("T")
_logger = logging.getLogger(__name__)

#: Whole numbers below are exact in float32, and so are all of their sums below.
_EXACT = 2.0**24
_BYTE = 8
_IMAGE_DIMS = 4
#: Shapes of which a layer remembers whether its kernel is exact.
_MOST_SHAPES = 256
#: Rows of a linear layer that are compared with float64.
_ROWS = 4

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

    __slots__ = ("_numbers", "_result", "runtime")

    def __init__(self, runtime: str, result: TensorQuantizer | None = None) -> None:
        self.runtime = runtime
        self._result = None if result is None else weakref.ref(result)
        self._numbers: KeptNumbers[Any] = KeptNumbers()

    @property
    def result(self) -> TensorQuantizer | None:
        """The quantizer that the kernel rounds for, if it is still there."""
        return None if self._result is None else self._result()

    @property
    def arithmetic(self) -> Arithmetic | None:
        """The formulas of the runtime."""
        runtime = RUNTIMES.get(self.runtime)
        return None if runtime is None else runtime.arithmetic

    def __deepcopy__(self, memo: dict[int, Any]) -> IntegerKernel:
        return type(self)(self.runtime, copy.deepcopy(self.result, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.runtime, self.result)

    def kept(
        self, settings: tuple[Any, ...], tensors: tuple[Tensor | None, ...], make: Any
    ) -> Any:
        """Return what ``make`` gives for the formulas, again where settings or numbers change."""

        def made() -> Any:
            arithmetic = self.arithmetic
            if arithmetic is None:
                return None
            with torch.inference_mode(False), torch.no_grad():
                return make(arithmetic)

        return self._numbers.get(settings, tensors, made)

    def of_grids(self, grids: tuple[CodeGrid, ...], make: Callable[..., T]) -> T | None:
        """Return ``make(arithmetic, *qparams)``, kept as long as the grids stay the same."""
        qparams = [grid.qparams for grid in grids]
        made: T | None = self.kept(
            grids, (), lambda arithmetic: make(arithmetic, *qparams)
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
    is_rounded: dict[str, bool] = {}
    for module in model.modules():
        kernel = getattr(module, "integer_kernel", None)
        if isinstance(kernel, IntegerKernel) and kernel.arithmetic is not None:
            before = is_rounded.get(kernel.runtime, False)
            is_rounded[kernel.runtime] = before or bool(
                getattr(module, "rounded_by", "")
            )
    target = planned_target(model)
    if not is_rounded and target is not None:
        is_rounded[target] = False
    lines = (
        evaluation_line(name, on_integers=rounded)
        for name, rounded in is_rounded.items()
    )
    return "; ".join(lines)


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


def integer_product(layer: Any, x: Tensor, multiply: Multiply) -> Tensor | None:
    """Return the result of a layer with a weight as its integer kernel computes it.

    Args:
        layer: a quantized convolution or linear layer.
        x: its input.
        multiply: computes the float layer.

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
    codes = _codes(of_input, grid, x)
    weight = _weight_as_called(of_weight, layer.weight)
    if isinstance(codes, Tensor) and weight is None:
        return product(codes, multiply)
    # A hook has changed what a quantizer returns.
    if weight is None:
        weight = _plain_weight(of_weight, layer.weight)
    simulated: Tensor = layer.simulated(
        _values(codes, grid), weight, layer.bias, multiply
    )
    return simulated


@dataclass(frozen=True, eq=False)
class _OffTheGrid:
    """Values that a hook made of those of a quantizer."""

    values: Tensor


def _codes(
    quantizer: TensorQuantizer, grid: CodeGrid, x: Tensor
) -> Tensor | _OffTheGrid:
    """Return the codes of an input; hooks of the quantizer see its call, and may change it."""
    if not _is_watched(quantizer):
        factors = quantizer.pre_quant_scale
        return grid.codes(x if factors is None else x * factors.to(x.dtype))
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
    return quantizer.qparams().dequantize(quantizer.codes(weight))


def _product_of(layer: Any, kernel: IntegerKernel, grid: CodeGrid) -> _Product | None:
    """Return the numbers of a layer as its ranges and weights are now; None if it simulates."""
    quantizer = layer.weight_quantizer
    if (
        not quantizer.quantizing
        or quantizer.observing
        or quantizer.delegate is not None
    ):
        return None
    result = kernel.result
    to = None if result is None else result.fixed_grid()
    if to is None and (layer.rounded_by or not layer.gives_float_results):
        return None
    marks = layer.bias_format, layer.rounded_by, layer.after_fold
    settings = (grid, to, quantizer.descriptor, *marks)
    of_weight = (
        quantizer.amax,
        quantizer._buffers.get("held_scale"),
        quantizer.pre_quant_scale,
    )
    tensors = (
        layer.weight,
        layer.bias,
        *of_weight,
        layer.output_gain,
        layer.output_shift,
    )
    if not layer.weight.is_cpu:  # nor can be the others
        return None
    product: _Product | None
    product = kernel.kept(
        settings, tensors, lambda found: _made(layer, found, grid, to)
    )
    return product


def _made(
    layer: Any, arithmetic: Arithmetic, grid: CodeGrid, to: CodeGrid | None
) -> _Product | None:
    """Return the numbers of a layer, made of its ranges and weights."""
    is_float = not layer.rounded_by
    if any(layer.after_fold):
        return None
    if layer.weight.dtype is not torch.float32 or not _has_whole_weights(
        layer.weight_quantizer
    ):
        return None
    quantizer, weight, bias = _with_correction(layer)
    if bool(raises_step(layer, bias).any()) or bool(quantizer.dead_ranges().any()):
        return None  # The file rounds the weight to another scale, or to nothing.
    codes = quantizer.codes(weight)
    step = grid.scale * quantizer.qparams().scale.flatten()
    if len(step) not in (1, len(weight)) or not bool(codes.isfinite().all()):
        return None
    step = step.expand(len(weight))
    if to is None or is_float:
        finish = arithmetic.float_products(step, bias)
        return _Product(_Sums(codes, None, grid), finish)
    bias_codes = None if bias is None else arithmetic.bias_codes(bias, step)
    finish = arithmetic.rounds_products(_by_channel(step, codes), to.scale)
    return _Product(_Sums(codes, bias_codes, grid), finish)


def _has_whole_weights(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    is_plain = type(quantizer) is TensorQuantizer and quantizer.pre_quant_scale is None
    is_fixed = quantizer.calibrated and not d.dynamic and d.fake_quant
    is_whole = (
        isinstance(d.format, IntFormat) and d.format.bits <= _BYTE and d.symmetric
    )
    return is_plain and is_fixed and is_whole and d.block_size is None


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
        self._is_exact: dict[Any, bool] = {}
        self._parts = _parts(weight, bias, grid)

    def __call__(self, codes: Tensor, multiply: Multiply) -> Tensor:
        """Return ``float(sum)`` of codes, in a new float32 tensor."""
        if not self._parts:
            return self._in_float64(codes, multiply)
        key = _conditions(codes)
        is_exact = self._is_exact.get(key)
        if is_exact is False:
            return self._in_float64(codes, multiply)
        sums = self._in_float32(codes, multiply)
        if is_exact is None:
            is_exact = self._agrees(codes, sums, multiply)
            self._remember(key, is_exact)
        return sums if is_exact else self._in_float64(codes, multiply)

    def _remember(self, key: Any, is_exact: bool) -> None:
        if len(self._is_exact) >= _MOST_SHAPES:
            self._is_exact.clear()
        self._is_exact[key] = is_exact
        if not is_exact:
            _logger.info("float32 does not add %s exactly here: float64 does", key[0])

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


def _conditions(codes: Tensor) -> tuple[Any, ...]:
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
    if pair is None or first.shape != second.shape:
        return None
    kernel, grids = pair
    add = kernel.of_grids(grids, lambda arithmetic, *ends: arithmetic.adds(*ends))
    if add is None:
        return None
    x, y = _codes_of_pair(layer, grids, first, second)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _values(x, grids[0]) + _values(y, grids[1])
    for part, other in tiles(x, y):
        add(part, other).mul_(grids[2].scale)
    return x


def integer_multiplication(layer: Any, first: Any, second: Any) -> Tensor | None:
    """Return the product of two tensors, element by element; see :func:`integer_sum`."""
    pair = _pair_of_codes(layer, first, second)
    if pair is None:
        return None
    kernel, grids = pair
    scaled = kernel.of_grids(
        grids, lambda arithmetic, *ends: arithmetic.multiplies(*ends)
    )
    if scaled is None:
        return None
    x, y = _codes_of_pair(layer, grids, first, second)
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return _values(x, grids[0]) * _values(y, grids[1])
    products = x.mul_(y) if x.shape == y.shape else x * y
    return _in_tiles(products, scaled, grids[2])


def _pair_of_codes(
    layer: Any, first: Any, second: Any
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
    x = _codes(layer.input_quantizer, grids[0], first)
    y = _codes(layer.other_quantizer, grids[1], second)
    return x, y


def _in_tiles(
    numbers: Tensor, to_codes: Callable[[Tensor], Tensor], grid: CodeGrid
) -> Tensor:
    """Return the values of the codes that a function makes of whole numbers, both in place."""
    for (part,) in tiles(numbers):
        to_codes(part).mul_(grid.scale)
    return numbers


# --- functions of one tensor --------------------------------------------------------------------


def integer_mean(layer: Any, x: Any) -> Tensor | None:
    """Return the mean over each image of (N, C, H, W), as (N, C, 1, 1).

    Returns:
        Values of codes, not clamped to the ends of their type; None where the layer simulates.
    """
    one = _one_of_codes(layer, x)
    if one is None or x.dim() != _IMAGE_DIMS:
        return None
    kernel, grids = one
    average = kernel.of_grids(
        grids, lambda arithmetic, *ends: arithmetic.averages(*ends)
    )
    if average is None:
        return None
    codes = _codes(layer.input_quantizer, grids[0], x)
    if not isinstance(codes, Tensor):
        return codes.values.mean((2, 3), keepdim=True)
    count = x.shape[2] * x.shape[3]
    # float32 adds whole numbers exactly, in any order, as long as no sum passes 2**24.
    dtype = torch.float32 if count * grids[0].largest < _EXACT else torch.float64
    sums = codes.sum((2, 3), keepdim=True, dtype=dtype).float()
    return average(sums, count).mul_(grids[1].scale)


def integer_window_means(
    layer: Any, x: Any, area: int, add: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return the mean of each window of ``area`` elements; see :func:`integer_mean`.

    Args:
        layer: an average pool whose windows all have this area.
        x: its input.
        area: the number of elements of a window.
        add: returns the sums of all windows.
    """
    one = _one_of_codes(layer, x)
    if one is None:
        return None
    kernel, grids = one
    if area * grids[0].largest >= _EXACT:
        return None
    average = kernel.of_grids(
        grids, lambda arithmetic, *ends: arithmetic.averages_windows(*ends, area)
    )
    if average is None:
        return None
    codes = _codes(layer.input_quantizer, grids[0], x)
    if not isinstance(codes, Tensor):
        return add(codes.values) / area
    return average(add(codes))


def integer_sigmoid(layer: Any, x: Any) -> Tensor | None:
    """Return the sigmoid of a tensor; see :func:`integer_mean`."""
    one = _one_of_codes(layer, x)
    if one is None:
        return None
    kernel, grids = one
    table = kernel.of_grids(grids, lambda arithmetic, *ends: arithmetic.sigmoid(*ends))
    if table is None:
        return None
    codes = _codes(layer.input_quantizer, grids[0], x)
    if not isinstance(codes, Tensor):
        return codes.values.sigmoid()
    return _looked_up(codes, table, grids[0]).mul_(grids[1].scale)


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
    codes = _codes(of_input, grids[0], x)
    if not isinstance(codes, Tensor):
        return codes.values * of_gate(codes.values.sigmoid())
    table, scaled = formulas
    gates = _looked_up(codes, table, grids[0])
    return _in_tiles(gates.mul_(codes), scaled, grids[2])


def _gate_formulas(
    arithmetic: Arithmetic, of: QParams, gate: QParams, to: QParams
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    return arithmetic.sigmoid(of, gate), arithmetic.multiplies(of, gate, to)


def _looked_up(codes: Tensor, table: Tensor, of: CodeGrid) -> Tensor:
    """Return what a table has for each code, both less their zero points; NaN for NaN."""
    result = torch.empty_like(codes)
    with_nan = F.pad(table, (0, 1), value=torch.nan)
    for part, codes_part in tiles(result, codes):
        places = (codes_part - of.low).nan_to_num_(nan=len(table)).to(torch.int32)
        part.copy_(with_nan.index_select(0, places.flatten()).view(part.shape))
    return result


def _one_of_codes(
    layer: Any, x: Any
) -> tuple[IntegerKernel, tuple[CodeGrid, ...]] | None:
    """Return the kernel of one tensor, and the grids of it and of the result."""
    kernel: IntegerKernel | None = layer.integer_kernel
    if kernel is None or not layer.rounded_by or layer.training:
        return None
    if not are_plain_numbers(x):
        return None
    grids = _grids(layer.input_quantizer, kernel.result)
    return None if grids is None else (kernel, grids)


def _grids(*quantizers: Any) -> tuple[CodeGrid, ...] | None:
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
