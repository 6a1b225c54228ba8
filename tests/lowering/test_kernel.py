"""Kernels against exact integers, and what a kernel object keeps: a packed weight, no more."""

import gc
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.lowering.common import weight_codes
from torchq.lowering.codes import CodesMaxPool2d
from torchq.lowering.kernel import (
    ACTIVATIONS,
    ConvParams,
    Epilogue,
    Int8Weights,
    Kernel,
    available,
    reference,
)
from torchq.lowering.qparams import ByteQParams

CONV = {0: F.linear, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
ARGUMENTS = {"clamp": (-0.5, 0.7)}
needs_onednn = pytest.mark.skipif(
    not available(), reason="needs torch's oneDNN operators"
)


def bound(x: Tensor, weights: Int8Weights, *rest: object) -> Tensor:
    """The product by a kernel that is bound for these codes; the residual is the last argument."""
    run = Kernel(weights.codes).bind(x.shape, weights, *rest)  # type: ignore[arg-type]
    return run(x) if rest[-1] is None else run(x, rest[-1])


RUNS: dict[str, Callable[..., Tensor]] = {"reference": reference}
if available():
    RUNS["bound"] = bound


def exact(
    x: Tensor, weights: Int8Weights, params: ConvParams, residual: Tensor | None
) -> Tensor:
    """The real value of a product before its activation, from exact integers in float64."""
    dims = len(params.stride)
    options = (None, *params) if dims else ()
    sums = CONV[dims](
        x.double() - weights.x_zero_point, weights.codes.double(), *options
    )
    channels = (-1, *[1] * dims)
    real = sums * weights.x_scale * weights.scale.double().view(channels)
    real = real if weights.bias is None else real + weights.bias.double().view(channels)
    return real if residual is None else real + residual


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dims", CONV)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_product_is_that_of_exact_integers(
    run: str, dims: int, name: str, generator: torch.Generator
) -> None:
    if dims and not ACTIVATIONS[name].on_conv:
        pytest.skip("no convolution applies it")
    choices = (
        (1, 4, 16),
        (0, 128),
        (torch.uint8, torch.float32),
        (True, False),
        (True, False),
    )
    for number, (groups, zero, out, with_bias, with_residual) in enumerate(
        itertools.product(*choices)
    ):
        if number % (5 if dims else 1) or (not dims and (groups > 1 or with_residual)):
            continue
        x = torch.randint(0, 256, (2, 16, *[7] * dims)[: dims + 2], generator=generator)
        weight = weight_codes(32, 16 // groups, *[3] * dims, generator=generator)
        scale = torch.rand(32, generator=generator) * 1e-3 + 1e-4
        bias = torch.randn(32, generator=generator) if with_bias else None
        params = ConvParams(
            *[
                (1 + number % 2,) * dims,
                (number % 2,) * dims,
                (1,) * dims,
            ],
            groups,
        )
        weights = Int8Weights(weight, scale, bias, 0.02, zero)
        real = exact(x, weights, params, None)
        residual = None
        of = None
        if with_residual:
            codes = torch.randint(0, 256, real.shape, generator=generator).to(
                torch.uint8
            )
            values = (codes.double() - 100) * 0.03
            real = real + values
            residual = codes if out is torch.uint8 else values.float()
            of = ByteQParams(0.03, 100, 0, 255) if out is torch.uint8 else None
        arguments = ARGUMENTS.get(name, ())
        real = ACTIVATIONS[name].function(real, *arguments)
        qparams = ByteQParams(0.05, 128, 0, 255) if out is torch.uint8 else None
        epilogue = Epilogue(qparams, name, arguments, of)
        got = RUNS[run](x.to(torch.uint8), weights, params, epilogue, residual)
        assert got.dtype is out
        assert got.shape == real.shape
        if out is torch.uint8:
            wrong = (got.double() - (real / 0.05).round().add(128).clamp(0, 255)).abs()
            # Float32 may round otherwise.
            tie = ((real / 0.05).remainder(1) - 0.5).abs() < 1e-3
            assert wrong.max() <= 1
            assert not wrong[~tie].any()
        else:  # sums of up to 16 * 27 products of 255 * 128, of which float32 loses 2**-24
            torch.testing.assert_close(got.double(), real, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("run", RUNS)
def test_a_residual_that_has_to_be_broadcast(
    run: str, generator: torch.Generator
) -> None:
    x = torch.randint(0, 256, (2, 16, 7, 7), generator=generator).to(torch.uint8)
    weight = weight_codes(32, 16, 3, 3, generator=generator)
    weights = Int8Weights(weight, torch.full((32,), 1e-3), None, 0.02, 0)
    params = ConvParams(
        (1, 1),
        (1, 1),
        (1, 1),
    )
    relu = Epilogue(activation="relu")
    residual = torch.randn(2, 32, 1, 1, generator=generator)
    without = RUNS[run](x, weights, params, Epilogue(), None)
    got = RUNS[run](x, weights, params, relu, residual)
    torch.testing.assert_close(got, F.relu(without + residual))


@pytest.mark.parametrize(
    "shape", [(2, 3, 9, 10), (1, 40, 8, 8), (1, 32, 6, 6), (0, 3, 9, 9), (3, 9, 9)]
)
@pytest.mark.parametrize(
    "window",
    [
        (3, 2, 1, 1, True),
        (2, 2, 0, 1, False),
        (3, 1, 0, 2, False),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_codes_of_any_number_of_channels_are_pooled_as_values(
    shape: tuple[int, ...], window: tuple[int, int, int, int, bool], last: bool
) -> None:
    """The kernel gets padded channels; none of them may be seen."""
    codes = torch.randint(0, 256, shape).to(torch.uint8)
    if last and codes.dim() == 4:
        codes = codes.contiguous(memory_format=torch.channels_last)
    *sizes, ceil_mode = window
    pool = nn.MaxPool2d(*sizes, ceil_mode=ceil_mode)
    assert torch.equal(
        CodesMaxPool2d(pool)(codes).float(),
        pool(codes.float()),
    )


def packed() -> int:
    """Return how many packed weights there are in this process."""
    gc.collect()
    return sum(type(thing) is Tensor and thing.is_mkldnn for thing in gc.get_objects())


@pytest.mark.sample(1)
@needs_onednn
@pytest.mark.parametrize(
    ("shape", "params"),
    [
        ((16, 8, 3), ConvParams((1,), (0,), (1,))),
        ((32, 4, 3, 3), ConvParams((2, 2), (1, 1), (1, 1), 4)),
        ((18, 1, 3, 3), ConvParams((1, 1), (0, 0), (1, 1), 18)),
        ((8, 4, 3, 3, 3), ConvParams((1,) * 3, (0,) * 3, (1,) * 3)),
        ((32, 32), ConvParams()),
        ((7, 20), ConvParams()),
    ],
    ids=str,
)
def test_packing_loses_nothing_and_drops_the_plain_weight(
    shape: tuple[int, ...], params: ConvParams, generator: torch.Generator
) -> None:
    codes = weight_codes(*shape, generator=generator)
    kernel = Kernel(codes)
    inputs = shape[1] * params.groups
    before = packed()
    expected = codes.clone()
    for size in (9, 12, 20, 9):
        image = (2, inputs, *[size] * len(params.stride))
        weights = Int8Weights(kernel.codes, torch.ones(shape[0]), None, 1.0, 0)
        kernel.bind(image, weights, params, Epilogue())
        assert kernel.plain is None
        assert torch.equal(kernel.codes, expected)
    assert packed() - before <= 3  # one for each layout that oneDNN asks for
