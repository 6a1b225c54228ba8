"""Asymmetric ranges: values, codes, gradients and kernels against the scalar oracle."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.contracts.quantize_contract import STORAGE, group_of, same, working
from tests.reference import affine_fake_quantize, round_to
from torchq.errors import ConfigError
from torchq.formats import (
    E4M3,
    INT8,
    POWER_OF_TWO,
    UINT4,
    UINT8,
    Format,
    Granularity,
    IntFormat,
    PerAxis,
    PerBlock,
    PerTensor,
    integer_format,
)
from torchq.functional import (
    Range,
    dequantize,
    fake_quantize,
    fake_quantize_affine,
    learned_fake_quantize,
    quantize,
)
from torchq.functional.kernels import use_backend

FORMATS = [
    INT8,
    UINT8,
    UINT4,
    integer_format(2),
    integer_format(16),
    integer_format(8, rounding="half_away"),
]
GRANULARITIES = [PerTensor(), PerAxis((1,)), PerAxis((0, -1)), PerBlock(2, 1)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sample(generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    """(2, 3, 4), mostly positive, with an exact zero."""
    x = torch.randn(2, 3, 4, generator=generator) + 0.8
    x[0, 0, 0] = 0.0
    return x.to(dtype)


def clipped(x: Tensor, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """A range in which the extreme elements do not fit."""
    high, low = Range.of(x, granularity, symmetric=False)
    return low * 0.8, high * 0.7


def oracle(
    x: Tensor,
    amin: Tensor,
    amax: Tensor,
    format: Format,
    granularity: Granularity,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the values and the codes of each element."""
    assert isinstance(format, IntFormat)
    spec = working(x.dtype)
    values = torch.empty_like(x)
    codes = torch.empty(x.shape, dtype=torch.float64)
    for index in itertools.product(*map(range, x.shape)):
        group = group_of(index, granularity)
        codes[index], _, value = affine_fake_quantize(
            float(x[index]),
            float(amin[group]),
            float(amax[group]),
            format.bits,
            not format.signed,
            power_of_two,
            format.rounding,
            spec,
        )
        values[index] = round_to(value, STORAGE[x.dtype])
    return values, codes


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f"{f.name}-{f.rounding}")
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_values_and_codes(
    format: Format,
    granularity: Granularity,
    power_of_two: bool,
    generator: torch.Generator,
) -> None:
    x = sample(generator)
    amin, amax = clipped(x, granularity)
    scale_format = POWER_OF_TWO if power_of_two else None
    values, codes = oracle(x, amin, amax, format, granularity, power_of_two)
    arguments = (amax, format, granularity, scale_format, amin)
    assert same(fake_quantize(x, *arguments), values)
    assert torch.equal(quantize(x, *arguments).double(), codes)
    assert same(dequantize(quantize(x, *arguments), *arguments), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_dtypes_and_backends(
    dtype: torch.dtype, backend: str, generator: torch.Generator
) -> None:
    x = sample(generator, dtype)
    amin, amax = clipped(x, PerAxis((1,)))
    with use_backend(backend):
        y = fake_quantize(x, amax, UINT8, PerAxis((1,)), amin=amin)
    assert same(y, oracle(x, amin, amax, UINT8, PerAxis((1,)))[0])


def test_tiles_and_layouts_give_the_same_bits(generator: torch.Generator) -> None:
    x = torch.randn(3, 5, 301, 307, generator=generator).to(
        memory_format=torch.channels_last
    )
    x.requires_grad_()
    for granularity in (PerTensor(), PerAxis((1,))):
        amin, amax = clipped(x, granularity)
        results = []
        for backend in ("reference", "tiled"):
            with use_backend(backend):
                y = fake_quantize(x, amax, UINT8, granularity, amin=amin)
                results.append((y, *torch.autograd.grad(y.square().sum(), x)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == x.stride()


def test_zero_is_a_value_whatever_the_range() -> None:
    for low, high in [(-1.0, 0.3), (0.0, 7.0), (-5.0, 0.0), (2.0, 3.0), (-9.0, -1.0)]:
        y = fake_quantize(torch.zeros(3), high, UINT8, amin=low)
        assert torch.equal(y, torch.zeros(3))
    # A range on one side of zero is widened to contain it.
    actual = Range(torch.tensor(5.1), torch.tensor(2.0)).qparams(UINT8)
    assert actual.scale == torch.tensor(5.1) / 255
    assert actual.zero_point == 0


def test_odd_values_and_dead_ranges() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 3.0, -0.0])
    y = fake_quantize(x, 2.55, UINT8, amin=0.0)
    assert y[0].isnan()
    assert y[1:].tolist() == pytest.approx([2.55, 0.0, 2.55, 0.0])
    dead = fake_quantize(x, 0.0, UINT8, amin=0.0)
    assert dead[0].isnan()
    assert dead[1:].eq(0).all()
    assert quantize(x[3:], 0.0, INT8, amin=0.0).tolist() == [-128, -128]
    poisoned = fake_quantize(
        torch.ones(2),
        torch.tensor(torch.inf),
        UINT8,
        amin=0.0,
    )
    assert poisoned.isnan().all()
    assert fake_quantize(torch.empty(0, 3), 1.0, UINT8, amin=-1.0).shape == (0, 3)


def test_gradients_by_hand() -> None:
    x = torch.tensor([-3.0, -0.6, 0.0, 0.3, 99.0], requires_grad=True)
    scale = torch.tensor(0.5, requires_grad=True)
    point = torch.tensor(2.3, requires_grad=True)
    y = fake_quantize_affine(x, scale, point, UINT4)
    assert y.tolist() == [-1.0, -0.5, 0.0, 0.5, 6.5]
    weights = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    (y * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 10.0, 100.0, 1000.0, 0.0]
    # Inside round(v) - v; outside the bound: codes 0 and 15 less the zero point 2.
    expected = -2 + 10 * (-1 + 1.2) + 1000 * (1 - 0.6) + 10000 * 13
    assert scale.grad is not None
    assert float(scale.grad) == pytest.approx(expected, rel=1e-6)
    assert point.grad is not None
    assert float(point.grad) == -0.5 * (1 + 10000)


@pytest.mark.parametrize(
    "granularity", [PerTensor(), PerAxis((1,)), PerBlock(2, 1)], ids=str
)
def test_masked_gradients_equal_learned_ones(
    granularity: Granularity, generator: torch.Generator
) -> None:
    x = sample(generator)
    x[1, 1, 1] = torch.nan
    amin, amax = (
        end.nan_to_num(1.0) for end in clipped(sample(generator), granularity)
    )
    grads = []
    for function in (fake_quantize, learned_fake_quantize):
        leaf = x.clone().requires_grad_()
        low = amin.clone().requires_grad_()
        function(leaf, amax, UINT8, granularity, amin=low).sum().backward()
        grads.append(leaf.grad)
        assert (low.grad is None) == (function is fake_quantize)
    assert torch.equal(grads[0], grads[1])
    assert grads[0] is not None
    assert 0 < int(grads[0].sum()) < x.numel()


def test_transforms_and_second_derivatives(generator: torch.Generator) -> None:
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    ends = (
        torch.tensor(-0.5, dtype=torch.float64),
        torch.tensor(1.0, dtype=torch.float64),
    )
    batched = torch.vmap(lambda row: fake_quantize(row, ends[1], UINT8, amin=ends[0]))(
        x
    )
    assert torch.equal(batched, fake_quantize(x, ends[1], UINT8, amin=ends[0]))
    scale = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    leaf = x.clone().requires_grad_()
    y = fake_quantize_affine(leaf, scale, 3.0, UINT4).square().sum()
    (first,) = torch.autograd.grad(y, scale, create_graph=True)
    assert torch.autograd.grad(first, leaf)[0].abs().sum() > 0


@pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"  # torch 2.9
)
def test_compiles_as_one_graph(generator: torch.Generator) -> None:
    x = torch.randn(5, 7, generator=generator)
    compiled = torch.compile(
        lambda x, low, high: fake_quantize(x, high, UINT8, amin=low),
        fullgraph=True,
        backend="aot_eager",
    )
    ends = torch.tensor(-0.7), torch.tensor(1.1)
    assert torch.equal(
        compiled(x, *ends), fake_quantize(x, ends[1], UINT8, amin=ends[0])
    )


def test_errors() -> None:
    with pytest.raises(
        ConfigError, match="got a zero point for e4m3; expected an integer format"
    ):
        fake_quantize(torch.ones(2), 1.0, E4M3, amin=-1.0)
    with pytest.raises(TypeError, match=r"got a tensor of torch\.int64"):
        fake_quantize_affine(torch.ones(2, dtype=torch.int64), 1.0, 0.0)
