"""The formulas of ONNX Runtime's integer kernels on CPUs, in float32 as the kernels compute.

``fl`` rounds to float32, ``rint`` to a whole number, half to even; ``acc`` is the exact sum of
products of codes less their zero points, with the bias code.

-   QLinearConv and QGemm: ``rint(fl(float(acc) * fl(fl(sx * sw) / sy)))``, one product, and the
    bias code ``rint(fl(bias / fl(sx * sw)))``.
-   MatMulIntegerToFloat, a matrix product whose result is read in float: ``fl(float(acc) * fl(sx *
    sw))``, to which an Add adds the bias, which is never rounded.
-   QLinearAdd, on unsigned codes: ``f = fl(zc - fma(ra, za, fl(rb * zb)))`` once, then the second
    operand first, ``rint(fma(A, ra, fma(B, rb, f)))`` with ``ra = fl(sa / sc)``.
-   QLinearGlobalAveragePool of n codes: ``rint(fl(acc * fl(sx / fl(sy * n))))``.

Source: version 1.32, of which no code of 106.7 million differs (qladd_avx2.cpp for the order of the
addition; kernels for other processors were not run).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.functional.kernels.tiled import tiles


class OnnxRuntimeArithmetic:
    """See :class:`torchq.runtime.Arithmetic`."""

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

    def averages(self, of: QParams, to: QParams) -> Callable[[Tensor, int], Tensor]:
        """Return how QLinearGlobalAveragePool makes codes of sums over an image, in place."""
        from_scale = of.scale.reshape(())
        to_scale = to.scale.reshape(())

        def average(sums: Tensor, count: int) -> Tensor:
            return sums.mul_(from_scale / (to_scale * count)).round_()

        return average


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
