"""The straight-through mask, and the gradients of learned ranges against the formula of LSQ."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchq.formats import (
    CATALOG,
    INT8,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
)
from torchq.functional import (
    fake_quantize,
    learned_fake_quantize,
    quantize,
    reduce_amax,
    scale_from_amax,
)

GRANULARITIES = [
    PerTensor(),
    PerAxis((0,)),
    PerAxis((1,)),
    PerAxis((0, 1)),
    PerBlock(2),
]
FORMATS = ["int8", "int4", "int4_narrow", "uint4", "e4m3", "e2m1"]


def gradient(
    function: Callable[..., Tensor],
    x: Tensor,
    amax: Tensor,
    *args: object,
    weights: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """d sum(weights * y) / d x and / d amax."""
    x, amax = x.detach().requires_grad_(), amax.detach().requires_grad_()
    (function(x, amax, *args) * weights).sum().backward()
    assert x.grad is not None
    return x.grad, amax.grad


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
def test_straight_through_mask(
    granularity: Granularity, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The gradient passes where ``|x| <= amax``, boundary included, and nothing goes to amax."""
    # Hits the boundary often.
    x = torch.randint(-4, 5, (3, 6), generator=generator).to(dtype)
    amax = granularity.amax(x).float().clamp(min=1.0) - 1.0
    weights = torch.randint(1, 9, (3, 6), generator=generator).to(dtype)
    grad_x, grad_amax = gradient(
        fake_quantize, x, amax, INT8, granularity, weights=weights
    )
    inside = granularity.join(
        granularity.split(x).abs() <= granularity.align(amax.to(dtype), x.shape),
        x.shape,
    )
    assert torch.equal(grad_x, weights * inside)
    assert grad_x.dtype is dtype
    assert grad_amax is None


def lsq_by_hand(
    x: Tensor, amax: Tensor, format: Format, granularity: Granularity, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Esser et al. 2020, equations 3 and 5, element by element; ``d scale / d amax = 1 / qmax``."""
    grad_x = torch.zeros_like(x)
    grad_amax = torch.zeros_like(amax)
    parts = granularity.split(x)
    upstream = granularity.split(weights)
    scale = scale_from_amax(granularity.align(amax, x.shape), format).expand_as(parts)
    owner = granularity.align(
        torch.arange(amax.numel()).view(amax.shape), x.shape
    ).expand_as(parts)
    codes = granularity.split(quantize(x, amax, format, granularity))
    inside = torch.zeros_like(parts)
    for index in torch.cartesian_prod(*map(torch.arange, parts.shape)).tolist():
        at = tuple(index)
        v = (parts[at] / scale[at]).item()
        q = codes[at].item()
        between = format.quant_min <= v <= format.quant_max
        inside[at] = float(between)
        slope = (
            q - v
            if between
            else (format.quant_min if v < format.quant_min else format.quant_max)
        )
        grad_amax.view(-1)[owner[at]] += upstream[at] * slope / format.qmax
    grad_x = granularity.join(inside, x.shape) * weights
    return grad_x, grad_amax


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_learned_range_is_lsq(
    name: str, granularity: Granularity, generator: torch.Generator
) -> None:
    x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    amax = reduce_amax(x, granularity) * 0.8
    weights = torch.randn(3, 6, generator=generator, dtype=torch.float64)
    grad_x, grad_amax = gradient(
        learned_fake_quantize, x, amax, CATALOG[name], granularity, weights=weights
    )
    hand_x, hand_amax = lsq_by_hand(x, amax, CATALOG[name], granularity, weights)
    assert torch.equal(grad_x, hand_x)
    torch.testing.assert_close(grad_amax, hand_amax)  # sums in another order


def test_learned_range_of_low_precision_data(low_dtype: torch.dtype) -> None:
    """amax keeps float32 and so does its gradient, summed in float32.

    The gradient of x has the dtype of x.
    """
    x = (
        torch.linspace(-1.5, 1.5, 4096, dtype=torch.float32)
        .to(low_dtype)
        .requires_grad_()
    )
    amax = torch.tensor(1.0, requires_grad=True)
    learned_fake_quantize(x, amax, CATALOG["int4"]).float().sum().backward()
    exact = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    learned_fake_quantize(x.detach().double(), exact, CATALOG["int4"]).sum().backward()
    assert amax.grad is not None
    assert exact.grad is not None
    assert x.grad is not None
    assert amax.grad.dtype is torch.float32
    assert x.grad.dtype is low_dtype
    # 4096 float32 terms of size 1, each rounded to 2**-24 relative
    assert amax.grad.item() == pytest.approx(exact.grad.item(), abs=4096 * 2.0**-23)
