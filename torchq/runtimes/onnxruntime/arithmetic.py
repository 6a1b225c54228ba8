"""The formulas of ONNX Runtime's integer kernels on CPUs, in float32 as the kernels compute.

``fl`` rounds to float32, ``rint`` to a whole number, half to even; ``acc`` is the exact sum of
products of codes less their zero points, with the bias code.

-   QLinearConv and QGemm: ``rint(fl(float(acc) * fl(fl(sx * sw) / sy)))``, one product, and the
    bias code ``rint(fl(bias / fl(sx * sw)))``.
-   MatMulIntegerToFloat, a matrix product whose result is read in float: ``fl(float(acc) * fl(sx *
    sw))``, to which an Add adds the bias, which is never rounded.
-   QLinearAdd, on unsigned codes: ``f = fl(zc - fma(ra, za, fl(rb * zb)))`` once, then the second
    operand first, ``rint(fma(A, ra, fma(B, rb, f)))`` with ``ra = fl(sa / sc)``.
-   QLinearMatMul as QLinearConv, without a bias.
-   QLinearGlobalAveragePool of n codes: ``rint(fl(acc * fl(sx / fl(sy * n))))``. Windows of n are
    QLinearConv with the weight 1 and ``sw = fl(1 / n)`` in images.
-   QLinearAveragePool, of signals and volumes, and of images where padding does not count: float
    sums ``s`` of values, in order, and ``rint(fl(fl(fl(s / n) / sy) + zy))``.
-   QLinearMul, on unsigned codes: ``rint(fl(fl(A * B * r) + zc))``, A and B less their zero points,
    with ``r = fl(fl(sa * sb) / sc)``.
-   QLinearSigmoid: a table of 256 codes, of ``p / q + 1/2``, polynomials of Eigen's logistic
    function in fused multiply-adds (logistic.cpp).

Source: version 1.32, of which no code of 106.7 million differs, of products none of 19.7 million,
of sigmoids none of 5.1 million, where torch's differs in 24 (qladd_avx2.cpp for the order of the
addition; kernels for other processors were not run).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.functional import CodeGrid, QParams
from torchq.functional.kernels.tiled import tiles
from torchq.functional.windows import Windows

#: Whole numbers below are exact in float32, and so are all of their sums below.
_EXACT = 2.0**24
_IMAGE_DIMS = 2


class OnnxRuntimeArithmetic:
    """See :class:`torchq.runtime.Arithmetic`."""

    divides = True
    finishes = None
    values_product = None
    multiplies_matrices = True

    @property
    def code_biases(self) -> OnnxRuntimeArithmetic:
        """These."""
        return self

    @property
    def operators(self) -> OnnxRuntimeArithmetic:
        """These."""
        return self

    def bias_codes(self, bias: Tensor, step: Tensor) -> Tensor:
        """Return the codes of a bias in QLinearConv and QGemm."""
        return torch.round(bias / step)

    def rounds_products(self, step: Tensor, to: Tensor) -> Callable[[Tensor], Tensor]:
        """Return how QLinearConv and QGemm make codes of sums, in place, and these values."""
        factor = step / to

        def values(sums: Tensor) -> Tensor:
            for part, factors, scale in tiles(sums, _with_dims(factor, sums), to):
                part.mul_(factors).round_().mul_(scale)
            return sums

        return values

    def float_products(
        self, step: Tensor, bias: Tensor | None
    ) -> Callable[[Tensor], Tensor]:
        """Return how MatMulIntegerToFloat and Add make values of sums, in place."""
        if bias is None:
            return lambda sums: sums.mul_(step)
        return lambda sums: sums.mul_(step).add_(bias)

    def adds(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return how QLinearAdd makes codes of two tensors of codes, all less their zero points."""
        a, b, c = (qparams.stored(signed=False) for qparams in (first, second, to))
        ratio_a = float(a.scale / c.scale)
        ratio_b = float(b.scale / c.scale)
        zero_a = float(a.zero_point)
        zero_b = float(b.zero_point)
        zero_c = float(c.zero_point)
        # Products of 24 and of 8 bits are exact in float64.
        second_zero = torch.tensor(ratio_b * zero_b, dtype=torch.float32, device="cpu")
        of_zeros = second_zero.double() + ratio_a * zero_a
        fixed = zero_c - of_zeros.float()

        def add(x: Tensor, y: Tensor) -> Tensor:
            second_added = _fused(fixed, y.add_(zero_b), ratio_b, out=y)
            added = _fused(second_added, x.add_(zero_a), ratio_a, out=x)
            return added.round_().sub_(zero_c)

        return add

    def averages(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor]:
        """Return how a pool makes values of codes: the kernel depends on its windows."""
        if windows.is_whole:
            return self._averages_images(of, to, windows)
        if windows.are_equal and len(windows.size) == _IMAGE_DIMS:
            return self._averages_as_convolution(of, to, windows)
        return self._averages_values(of, to, windows)

    def _averages_images(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor]:
        """Return how QLinearGlobalAveragePool does it."""
        to_scale = to.scale.reshape(())
        factor = of.scale.reshape(()) / (to_scale * windows.area)
        dtype = _dtype_of_sums(of, windows)

        def average(codes: Tensor) -> Tensor:
            dims = tuple(range(2, codes.dim()))
            sums = codes.sum(dims, keepdim=True, dtype=dtype).float()
            return sums.mul_(factor).round_().mul_(to_scale)

        return average

    def _averages_as_convolution(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor]:
        """Return how QLinearConv does it, with the weight 1: files have convolutions there."""
        of_one = torch.tensor(1 / windows.area, dtype=torch.float32, device="cpu")
        step = of.scale.reshape(()) * of_one
        values = self.rounds_products(step, to.scale.reshape(()))
        size, stride, padding = windows.size, windows.stride, windows.padding

        dtype = _dtype_of_sums(of, windows)

        def average(codes: Tensor) -> Tensor:
            # Divided by 1, averages are sums.
            sums = F.avg_pool2d(
                codes.to(dtype),
                size,
                stride,
                padding,
                divisor_override=1,
            )
            return values(sums.float())

        return average

    def _averages_values(
        self, of: QParams, to: QParams, windows: Windows
    ) -> Callable[[Tensor], Tensor]:
        """Return how QLinearAveragePool does it: it adds float values in order."""
        of_scale = of.scale.reshape(())
        to_scale = to.scale.reshape(())
        zero_point = float(to.stored(signed=False).zero_point)

        def average(codes: Tensor) -> Tensor:
            means = windows.sums(codes.mul_(of_scale)).div_(windows.counts(codes))
            return (
                means.div_(to_scale)
                .add_(zero_point)
                .round_()
                .sub_(zero_point)
                .mul_(to_scale)
            )

        return average

    def multiplies(
        self, first: QParams, second: QParams, to: QParams
    ) -> Callable[[Tensor], Tensor]:
        """Return how QLinearMul makes codes of products of two codes, in place."""
        scales = (qparams.scale.reshape(()) for qparams in (first, second, to))
        ratio = _ratio(*scales)
        zero_point = float(to.stored(signed=False).zero_point)

        def scaled(products: Tensor) -> Tensor:
            return products.mul_(ratio).add_(zero_point).round_().sub_(zero_point)

        return scaled

    def sigmoid(self, of: QParams, to: QParams) -> Tensor:
        """Return the code that QLinearSigmoid has for each code."""
        zero_point = float(of.zero_point)
        codes = torch.arange(of.quant_min, of.quant_max + 1, device="cpu") - zero_point
        values = _logistic(codes.float() * of.scale.reshape(()))
        return CodeGrid.of(to).codes(values)


def _dtype_of_sums(of: QParams, windows: Windows) -> torch.dtype:
    """Return what adds the codes of a window exactly: float32 as long as no sum passes 2**24."""
    is_small = windows.area * CodeGrid.of(of).largest < _EXACT
    return torch.float32 if is_small else torch.float64


def _ratio(first: Tensor, second: Tensor, to: Tensor) -> Tensor:
    return first * second / to


#: The polynomials of Eigen's logistic function, the highest power of x**2 first.
_ODD = (
    4.37031012579801e-11,
    1.15627324459942e-07,
    6.08574864600143e-05,
    8.51377133304701e-03,
    2.48287947061529e-01,
)
_EVEN = (
    6.10247389755681e-13,
    5.76102136993427e-09,
    6.29106785017040e-06,
    1.70198817374094e-03,
    1.16817656904453e-01,
    9.93151921023180e-01,
)
_LOGISTIC_END = 18.0


def _logistic(x: Tensor) -> Tensor:
    """Return the logistic function of float32 numbers, to the bits of the kernel."""
    x = x.clamp(-_LOGISTIC_END, _LOGISTIC_END)
    odd = _polynomial(x * x, _ODD) * x
    return odd / _polynomial(x * x, _EVEN) + 0.5


def _polynomial(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Return a polynomial by Horner's rule; each step is rounded once, to float32."""
    exact = torch.tensor(factors, dtype=torch.float32, device="cpu").double()
    result = exact[0].expand_as(x)
    for factor in exact[1:]:
        # The product of two float32 numbers is exact in float64.
        result = (result * x.double() + factor).float().double()
    return result.float()


def _with_dims(factor: Tensor, sums: Tensor) -> Tensor:
    """Return factors of channels with as many dimensions as sums."""
    return factor.view(*[1] * (sums.dim() - factor.dim()), *factor.shape)


def _fused(addend: Tensor, codes: Tensor, ratio: float, out: Tensor) -> Tensor:
    """Write ``addend + codes * ratio``, rounded once, in float32, into ``out``; return it."""
    if _adds_in_one_step():
        return torch.add(addend, codes, alpha=ratio, out=out)
    return out.copy_(codes.double().mul_(ratio).add_(addend))


@cache
def _adds_in_one_step() -> bool:
    """Return True if ``torch.add`` with a factor is one fused multiply-add on this processor.

    It is with AVX2 and AVX512, for the rest of a vector too, and not with the kernels for any.
    """
    ratio = float(torch.tensor(1 / 3, dtype=torch.float32, device="cpu"))
    codes = torch.arange(256 * 5 + 3, dtype=torch.float32, device="cpu") % 256
    addend = torch.arange(len(codes), dtype=torch.float32, device="cpu").mul_(0.37)
    in_one = codes.double().mul_(ratio).add_(addend).float()
    in_two = (codes * ratio).add_(addend)
    assert not torch.equal(in_one, in_two)
    scalar = torch.tensor(0.37, dtype=torch.float32, device="cpu")
    whole = codes.double().mul_(ratio).add_(scalar).float()
    return torch.equal(torch.add(addend, codes, alpha=ratio), in_one) and torch.equal(
        torch.add(scalar, codes, alpha=ratio), whole
    )
