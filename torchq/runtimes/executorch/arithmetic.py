"""The formulas of XNNPACK's kernels on CPUs with fused multiply-adds, as ExecuTorch calls them.

``fl`` rounds to float32, ``rint`` to a whole number, half to even; ``acc`` is the exact sum of
products of codes less their zero points, with the bias code.

-   Codes of floats: ``rint(fl(x * fl(1 / s)))``, a product, no division.
-   Convolutions and linear layers (qs8-qc8w, "fp32" requantization): ``rint(fl(float(acc) *
    fl(fl(sx * sw) / sy)))``. The bias code is ``rint(fl(bias * fl(1 / fl(sx * sw))))``.
-   Additions (qs8-vadd): with ``ra = fl(sa / sc)``, ``rb = fl(sb / sc)`` and the shift that gives
    the larger of them 21 bits, ``ma = rint(ra * 2**shift)``; ``(A * ma + B * mb + 2**(shift - 1))
    >> shift``, so half goes up.
-   Products (qs8-vmul): ``rint(fl(float(A * B) * fl(fl(sa * sb) / sc)))``.
-   Means over images (qs8-rdsum): ``rint(fl(float(acc) * fl(fl(sx / sy) * fl(1 / n))))``.
-   Layers whose result is float multiply values: the bias, and then one fused multiply-add after
    another, by positions of the window and by channels in each (f32-gemm, f32-igemm).
-   Average pools are float (f32-avgpool): sums of up to nine values in pairs, column by column,
    times ``fl(1 / n)``.

What is not here is computed in float by ExecuTorch, in an order that is not known, and simulated.
Source: ExecuTorch 1.5.1 on x86 with AVX512, of which no code of an addition, product or mean
differs in millions of pairs. Files of other processors may have other kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.functional.kernels.tiled import tiles
from torchq.functional.windows import Windows

#: Whole numbers below are exact in float32, and so are all of their sums below.
_EXACT = 2.0**24
#: The bits of the multipliers of additions.
_MULTIPLIER_BITS = 20
_IMAGE_DIMS = 2
#: Elements of a window that a pool adds in one pass; the order for more is not known.
_ONE_PASS = 9
#: Multiply-adds of a float layer for one image, above which torch computes it: in order they take
#: several times as long.
_MOST_STEPS = 2**24


class XnnpackArithmetic:
    """See :class:`torchq.runtime.Arithmetic`."""

    divides = False
    finishes = None
    # Layers with float results multiply values.
    float_products = None
    multiplies_matrices = False

    @property
    def code_biases(self) -> XnnpackArithmetic:
        """These."""
        return self

    @property
    def operators(self) -> XnnpackArithmetic:
        """These."""
        return self

    def bias_codes(self, bias: Tensor, step: Tensor) -> Tensor:
        """Return the codes of a bias; a file holds ``rint(bias / step) * step``."""
        stored = torch.round(bias / step) * step
        return torch.round(stored * step.reciprocal())

    def rounds_products(self, step: Tensor, to: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what rounds the sums of a convolution or linear layer, in place, to its results.

        The sums are whole numbers of ``step``; the results are whole numbers of ``to``.
        """
        factor = step / to

        def values(sums: Tensor) -> Tensor:
            factors = factor.view(*[1] * (sums.dim() - factor.dim()), *factor.shape)
            for part, of_part, scale in tiles(sums, factors, to):
                part.mul_(of_part).round_().mul_(scale)
            return sums

        return values

    def values_product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    ) -> Tensor:
        """Return a layer's float result, added in the order of the kernel.

        Args:
            x: (..., in), or images, (N, in, ...).
            weight: (out, in), or (out, in / groups, ...).
            bias: (out,), or None.
            multiply: computes the layer; of grouped and of large layers this is the result.
        """
        if weight.dim() == 2:
            return _linear_in_order(x, weight, bias, multiply)
        return _convolution_in_order(x, weight, bias, multiply)

    def adds(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return how two tensors of codes are added, all less their zero points."""
        ratio_a = float(first.scale / to.scale)
        ratio_b = float(second.scale / to.scale)
        _, exponent = math.frexp(max(ratio_a, ratio_b))
        steps = 2.0 ** (_MULTIPLIER_BITS + 1 - exponent)
        # Python rounds half to even too.
        factor_a = round(ratio_a * steps) / steps
        factor_b = round(ratio_b * steps) / steps

        def add(x: Tensor, y: Tensor) -> Tensor:
            # Products of 8 and of 21 bits, and their sum, are exact in float64.
            exact = x.double().mul_(factor_a).add_(y.double(), alpha=factor_b)
            return x.copy_(exact.add_(0.5).floor_())

        return add

    def averages(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor] | None:
        """Return how means over images, and pools of small windows, are computed."""
        if len(windows.size) != _IMAGE_DIMS:
            return None
        if windows.is_whole:
            return _mean_of_images(of, to, windows)
        if any(windows.padding) or windows.area > _ONE_PASS:
            return None
        return _average_in_order(of, windows)

    def multiplies(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor], Tensor]:
        """Return how products of two codes become codes, in place."""
        step = first.scale.reshape(()) * second.scale.reshape(())
        ratio = step / to.scale.reshape(())
        return lambda products: products.mul_(ratio).round_()

    def sigmoid(self, of: QParams, to: QParams) -> Tensor | None:
        """Return None: it is computed in float, by a polynomial."""
        return None


# --- means --------------------------------------------------------------------------------------


def _mean_of_images(
    of: QParams, to: QParams, windows: Windows
) -> Callable[[Tensor], Tensor]:
    to_scale = to.scale.reshape(())
    share = torch.tensor(1 / windows.area, dtype=torch.float32, device="cpu")
    factor = of.scale.reshape(()) / to_scale * share
    largest = of.quant_max - of.quant_min
    is_small = windows.area * largest < _EXACT
    dtype = torch.float32 if is_small else torch.float64

    def average(codes: Tensor) -> Tensor:
        sums = codes.sum((2, 3), keepdim=True, dtype=dtype).float()
        return sums.mul_(factor).round_().mul_(to_scale)

    return average


def _average_in_order(of: QParams, windows: Windows) -> Callable[[Tensor], Tensor]:
    """Return how f32-avgpool does it in one pass; who reads the means rounds them."""
    scale = of.scale.reshape(())
    share = torch.tensor(1 / windows.area, dtype=torch.float32, device="cpu")

    def average(codes: Tensor) -> Tensor:
        e = _elements(codes.mul_(scale), windows)
        e += [torch.zeros_like(e[0])] * (_ONE_PASS - len(e))
        middle = (e[2] + e[3]).add_(e[4] + e[5])
        ends = (e[0] + e[1]).add_(e[8]).add_(e[6] + e[7])
        return middle.add_(ends).mul_(share)

    return average


def _elements(x: Tensor, windows: Windows) -> list[Tensor]:
    """Return the elements of all windows, column by column, each as a tensor of all windows."""
    (height, width), (down, right) = windows.size, windows.stride
    rows = (x.shape[2] - height) // down * down + 1
    columns = (x.shape[3] - width) // right * right + 1
    return [
        x[:, :, top : top + rows : down, left : left + columns : right]
        for left in range(width)
        for top in range(height)
    ]


# --- layers in float ----------------------------------------------------------------------------


def _linear_in_order(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    samples = len(x) if x.dim() > 1 else 1
    if x.numel() // max(samples, 1) * len(weight) > _MOST_STEPS:
        return multiply(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    total = rows.new_zeros(len(rows), len(weight))
    if bias is not None:
        total += bias
    factors = rows.T.contiguous()[..., None]
    for column, weights in zip(factors, weight.T.contiguous(), strict=True):
        _fused_add_(total, column, weights)
    return total.view(*x.shape[:-1], len(weight))


def _convolution_in_order(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    multiply: Callable[[Tensor, Tensor, Tensor | None], Tensor],
) -> Tensor:
    channels = weight.shape[1]
    is_grouped = x.dim() != weight.dim() or x.shape[1] != channels
    area = weight[0, 0].numel()
    steps = x[:1].numel() * area * len(weight)
    if is_grouped or steps > _MOST_STEPS:
        return multiply(x, weight, bias)
    # Each position of the window as a channel of its own.
    positions = torch.eye(area).view(area, 1, *weight.shape[2:])
    images = multiply(x.reshape(-1, 1, *x.shape[2:]), positions, None)
    lengths = images.shape[2:]
    parts = images.view(len(x), channels, area, *lengths)
    total = x.new_zeros(len(x), len(weight), *lengths)
    if bias is not None:
        total += bias.view(-1, *[1] * len(lengths))
    weights = weight.flatten(2)
    for position in range(area):
        for channel in range(channels):
            factor = weights[:, channel, position].view(-1, *[1] * len(lengths))
            _fused_add_(total, parts[:, channel : channel + 1, position], factor)
    return total


def _fused_add_(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add ``first * second`` to a float32 tensor, rounded once."""
    if _adds_products_in_one_step():
        total.addcmul_(first, second)
    else:
        # The product is exact in float64.
        total.copy_(first.double() * second.double() + total.double())


@cache
def _adds_products_in_one_step() -> bool:
    """Return True if ``torch.addcmul`` is one fused multiply-add on this processor."""
    numbers = torch.arange(1, 256 * 3 + 4, dtype=torch.float32, device="cpu")
    first, second, addend = (numbers / divisor for divisor in (3, 7, 11))
    once = (first.double() * second.double() + addend.double()).float()
    assert not torch.equal(first * second + addend, once)
    column, row = first[:7, None], second[:5]
    block = addend[:35].view(7, 5)
    of_block = (column.double() * row.double() + block.double()).float()
    return torch.equal(torch.addcmul(addend, first, second), once) and torch.equal(
        torch.addcmul(block, column, row), of_block
    )
