"""torch itself: the integer kernels that it ships for CPUs, through torchq.lowering.

The order of scale, bias and rounding. For input codes q of zero point z and weight codes w, per
output channel c::

    sum = sum of (q - z) * w                        exact, integers
    y   = sum * (weight_scale[c] * x_scale) + bias[c]               float32
    y   = activation(y + (r - residual_zero_point) * residual_scale)
    out = clamp(round_half_even(y / scale) + zero_point, 0, 255)    or y itself

Tensors of floats are divided by their scale, as in the simulation. oneDNN adds ``-z * sum of w`` to
the bias in float64 before the call, and where only clamps stand between y and the codes one float32
factor ``weight_scale * x_scale / scale`` takes the place of three roundings. The sums are exact,
but a code next to a tie may be one off: of the codes of layers that read what they read in the
simulation, one in 1e5 at most, or two where codes are unsigned and twice as fine. Most of them are
the simulation's, which adds in float32. A channel of 4 bits whose factor happens to be a fraction,
such as 3/34, has ties in many of its sums, and there are more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchq.functional import QParams
from torchq.functional.kernels.tiled import tiles
from torchq.lowering.api import lower_model
from torchq.lowering.kernel import available, saturates
from torchq.runtime import Arithmetic, LayerNumbers
from torchq.runtimes.engine import Engine, Task
from torchq.utils import copy_module

#: Spatial dimensions of which kernels include no activation.
_VOLUME_DIMS = 3


@dataclass(frozen=True, kw_only=True, repr=False)
class Torch(Engine):
    """The kernels of torch; needs no other package.

    Attributes:
        quantized: see :class:`Engine`.
        fuse: False replaces layers only, each with floating-point input and output, and does not
            trace the model.
    """

    name: str = "torch"
    versions: str = "2.9 to 2.14"
    proved: str = "per layer"
    kernels: frozenset[str] = frozenset(["rows", "clips", "moves", "layers alone"])
    # Layers return floats from integers.
    float_before_norms: frozenset[str] = frozenset()
    fuse: bool = True

    @property
    def arithmetic(self) -> Arithmetic | None:
        """See :attr:`Runtime.arithmetic`; None where there are no kernels, or they overflow."""
        return OneDnnArithmetic() if available() and not saturates() else None

    def build(self, task: Task) -> nn.Module:
        """See :meth:`Engine.build`; the task may have no example."""
        if not self.quantized:
            return copy_module(task.float_model)
        return lower_model(
            task.model,
            task.example,
            fuse=self.fuse,
            progress=task.progress,
            checks=task.checks,
            with_state=[name.rpartition(".")[0] for name in task.state],
        )


class OneDnnArithmetic:
    """The formulas of oneDNN's kernels; see :class:`torchq.runtime.Arithmetic`.

    ``acc`` is the sum of products with the codes as they are stored, zero point included, ``b`` the
    bias with what the zero point adds.

    -   A float result: ``fl(fl(float(acc) * fl(sx * sw)) + b)``.
    -   Codes, where only clips stand between: ``rint(fl(fl(fl(float(acc) * f) + fl(b / sy)) + zy))
        - zy`` with ``f = fl(sw * sx / sy)``, whose factors are multiplied in float64.

    So zero points matter to the last bit: behind a ReLU codes are stored from 0. Of 15 million
    codes and float results of convolutions and linear layers none differs.
    """

    divides = True
    # Biases are float, pools too, and plans give no operator to these kernels.
    code_biases = None
    float_products = None
    values_product = None
    multiplies_matrices = False
    operators = None

    def finishes(self, numbers: LayerNumbers) -> Callable[[Tensor], Tensor]:
        """Return how sums of a layer become values, in place."""
        x_scale = float(numbers.of.scale)
        zero = 0.0 if "input" in numbers.from_zero else _stored_zero_point(numbers.of)
        codes_sum = numbers.weight.flatten(1).sum(1, dtype=torch.float64)
        bias = None if numbers.bias is None else numbers.bias.double()
        if zero:
            shift = codes_sum * numbers.scale.double() * (x_scale * zero)
            bias = -shift if bias is None else bias - shift
        bias = None if bias is None else bias.float()
        of_zero = (codes_sum * zero).float() if zero else None
        factor = numbers.of.scale.reshape(()) * numbers.scale
        dims = numbers.weight.dim() - 2
        is_whole = numbers.to is not None and (
            dims < _VOLUME_DIMS or "result" not in numbers.from_zero
        )
        to_scale = 1.0
        if numbers.to is not None and is_whole:
            to_scale = float(numbers.to.scale)
            bias = None if bias is None else (bias.double() / to_scale).float()
            factor = (numbers.scale.double() * x_scale / to_scale).float()
        starts = "result" in numbers.from_zero
        of_result = None if not is_whole or starts else numbers.to
        zero_of_result = 0.0 if of_result is None else _stored_zero_point(of_result)
        steps = [
            *([] if of_zero is None else [(Tensor.add_, of_zero)]),
            (Tensor.mul_, factor),
            *([] if bias is None else [(Tensor.add_, bias)]),
        ]
        operations = [operation for operation, _ in steps]
        by_channel = [_by_channel(number, dims) for _, number in steps]

        def finish(sums: Tensor) -> Tensor:
            aligned = [_with_dims(number, sums) for number in by_channel]
            for part, *of_part in tiles(sums, *aligned):
                for operation, number in zip(operations, of_part, strict=True):
                    operation(part, number)
                if is_whole:
                    part.add_(zero_of_result).round_().sub_(zero_of_result)
                    part.mul_(to_scale)
            return sums

        return finish


def _stored_zero_point(qparams: QParams) -> float:
    return float(qparams.stored(signed=False).zero_point)


def _by_channel(numbers: Tensor, dims: int) -> Tensor:
    """Return numbers of channels as they broadcast against results of some spatial dimensions."""
    if not numbers.dim():
        return numbers
    return numbers.view(-1, *[1] * max(dims, 0))


def _with_dims(numbers: Tensor, sums: Tensor) -> Tensor:
    """Return numbers of channels with as many dimensions as sums."""
    if not numbers.dim():
        return numbers
    return numbers.view(*[1] * (sums.dim() - numbers.dim()), *numbers.shape)
