from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lowering.common import weight_codes
from torchq.lowering import definition, onednn
from torchq.lowering.kernel import ACTIVATIONS, ConvParams, Epilogue, Int8Weights
from torchq.lowering.operators import int8_conv, int8_linear
from torchq.lowering.packed import KERNELS

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DEVICE_KERNELS = ["cpu", "any"]
ARGUMENTS = {"clamp": (-0.5, 0.7)}


def conv_case(
    dims: int, groups: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randint(0, 256, (2, 16, *[7] * dims), generator=generator).to(torch.uint8)
    weight = weight_codes(32, 16 // groups, *[3] * dims, generator=generator)
    scale = torch.rand(32, generator=generator) * 1e-3 + 1e-4
    return x, weight, scale, torch.randn(32, generator=generator)


def expected_codes(real: Tensor, scale: float, zero: int) -> Tensor:
    return torch.round(real / scale + zero).clamp(0, 255)


def check(got: Tensor, real: Tensor, scale: float, zero: int) -> None:
    """Check a result against its exact value.

    Codes may differ by one within float32 rounding of a tie; floats by a few roundings of sums.
    """
    if got.dtype is torch.uint8:
        difference = (got.double() - expected_codes(real, scale, zero)).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01
    else:
        # Sums of up to 16 * 27 products of 255 * 128, in units of 1.1e-3 * 0.02: float32 loses
        # 2**-24 of that a few times.
        torch.testing.assert_close(got.double(), real, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", ["none", "relu", "clamp", "silu", "hardswish"])
def test_conv_equals_the_definition(
    kernel: str, dims: int, name: str, generator: torch.Generator
) -> None:
    run = int8_conv if kernel == "cpu" else definition.conv
    table = itertools.product(
        (1, 4, 16),
        (0, 128),
        (torch.uint8, torch.float32),
        ((1, 0), (1, 1), (2, 1)),
        (True, False),
        (True, False),
    )
    for groups, zero, out, (stride, padding), with_bias, with_residual in list(table)[
        :: 5 if kernel == "cpu" else 13
    ]:
        x, weight, scale, bias = conv_case(dims, groups, generator)
        static = ((stride,) * dims, (padding,) * dims, (1,) * dims, groups)
        real = CONV[dims](x.double() - zero, weight.double(), None, *static) * 0.02
        real = real * scale.double().view(-1, *[1] * dims) + (
            bias.double().view(-1, *[1] * dims) if with_bias else 0
        )
        residual, residual_qparams = None, (1.0, 0)
        if with_residual:
            codes = torch.randint(0, 256, real.shape, generator=generator).to(torch.uint8)
            values = (codes.double() - 100) * 0.03
            real = real + values
            residual = codes if out is torch.uint8 else values.float()
            residual_qparams = (0.03, 100) if out is torch.uint8 else (1.0, 0)
        arguments = ARGUMENTS.get(name, ())
        real = ACTIVATIONS[name].function(real, *arguments)
        output = (0.05, 128) if out is torch.uint8 else (1.0, 0)
        weights = Int8Weights(weight, scale, bias if with_bias else None, 0.02, zero)
        epilogue = Epilogue(*output, out, name, arguments, *residual_qparams)
        got = run(x, weights, ConvParams(*static), epilogue, residual)
        assert got.dtype is out
        check(got, real, *output)


@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_linear_equals_the_definition(kernel: str, name: str, generator: torch.Generator) -> None:
    run = int8_linear if kernel == "cpu" else definition.linear
    for shape, zero, out, with_bias in itertools.product(
        ((64,), (5, 64), (2, 3, 64)), (0, 128), (torch.uint8, torch.float32), (True, False)
    ):
        x = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        weight = weight_codes(32, 64, generator=generator)
        scale = torch.rand(32, generator=generator) * 1e-3 + 1e-4
        bias = torch.randn(32, generator=generator) if with_bias else None
        real = F.linear(
            x.double() - zero,
            weight.double() * scale.double().view(-1, 1) * 0.02,
            None if bias is None else bias.double(),
        )
        arguments = ARGUMENTS.get(name, ())
        real = ACTIVATIONS[name].function(real, *arguments)
        output = (0.05, 128) if out is torch.uint8 else (1.0, 0)
        weights = Int8Weights(weight, scale, bias, 0.02, zero)
        got = run(x, weights, Epilogue(*output, out, name, arguments))
        assert got.shape == (*shape[:-1], 32) and got.dtype is out
        check(got, real, *output)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (3, 2, 1, 1, True), (3, 1, 0, 2, False)],
)
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [(2,), (0,), ()])
def test_max_pool(
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    ceil: bool,
    format: torch.memory_format,
    batch: tuple[int],
) -> None:
    x = torch.randint(0, 256, (*batch, 3, 9, 10)).to(torch.uint8)
    x = x.contiguous(memory_format=format) if x.dim() == 4 else x
    got = torch.ops.torchq.max_pool2d(
        x, [kernel] * 2, [stride] * 2, [padding] * 2, [dilation] * 2, ceil
    )
    assert torch.equal(
        got.float(), F.max_pool2d(x.float(), kernel, stride, padding, dilation, ceil)
    )


def test_a_residual_that_has_to_be_broadcast(generator: torch.Generator) -> None:
    x, weight, scale, _ = conv_case(2, 1, generator)
    weights = Int8Weights(weight, scale, None, 0.02, 0)
    params, relu = ConvParams((1, 1), (1, 1), (1, 1)), Epilogue(activation="relu")
    residual = torch.randn(2, 32, 1, 1, generator=generator)
    without = int8_conv(x, weights, params, Epilogue())
    torch.testing.assert_close(
        int8_conv(x, weights, params, relu, residual), F.relu(without + residual)
    )


def test_operators_keep_torchs_contract(generator: torch.Generator) -> None:
    x, weight, scale, bias = conv_case(2, 1, generator)
    post = (0.05, 3, torch.uint8, "relu", [])
    conv = (x, weight, scale, bias, 0.02, 128, [2, 1], [1, 0], [1, 1], 1, *post)
    linear = (
        torch.randint(0, 256, (2, 5, 64)).to(torch.uint8),
        torch.ones(8, 64, dtype=torch.int8),
        torch.ones(8),
        None,
        0.02,
        0,
        *post,
    )
    pool = (x, [2, 2], [2, 2], [0, 0], [1, 1], False)
    for name, args in (("int8_conv", conv), ("int8_linear", linear), ("max_pool2d", pool)):
        results = torch.library.opcheck(getattr(torch.ops.torchq, name).default, args)
        assert set(results.values()) == {"SUCCESS"}


def test_packed_weights_die_with_the_plain_ones() -> None:
    x, weight = torch.ones(1, 32, dtype=torch.uint8), torch.ones(16, 32, dtype=torch.int8)
    before = len(KERNELS)
    int8_linear(x, Int8Weights(weight, torch.ones(16), None, 1.0, 0), Epilogue())
    # The packed weight has an entry of its own, by which its copies are found.
    assert len(KERNELS) == before + 2 * onednn.available()
    del weight
    assert len(KERNELS) == before


def test_another_bias_with_the_same_weight_is_seen() -> None:
    x, weight, scale = (
        torch.ones(1, 32, dtype=torch.uint8),
        torch.ones(16, 32, dtype=torch.int8),
        torch.ones(16),
    )
    for value in (1.0, 2.0):
        weights = Int8Weights(weight, scale, torch.full((16,), value), 1.0, 0)
        assert torch.equal(int8_linear(x, weights, Epilogue()), torch.full((1, 16), 32 + value))


@pytest.mark.parametrize(
    ("name", "bounds", "zero", "expected"),
    [
        ("none", (), 0, ("none", ())),
        ("relu", (), 0, ("none", ())),
        ("relu", (), 100, ("clamp", (0.0, 155.0))),
        ("clamp", (0.0, 127.0), 0, ("clamp", (0.0, 127.0))),
        ("clamp", (0.0, 300.0), 0, ("none", ())),
        ("clamp", (-1e9, float("inf")), 128, ("none", ())),
        ("clamp", (-128.0, 126.6), 128, ("none", ())),
        ("clamp", (-127.0, 12.4), 128, ("clamp", (-127.0, 12.0))),
    ],
)
@pytest.mark.parametrize("scale", [0.0123, 0.0456])
def test_bounds_in_codes(
    name: str,
    bounds: tuple[float, ...],
    zero: int,
    expected: tuple[str, tuple[float, ...]],
    scale: float,
    generator: torch.Generator,
) -> None:
    epilogue = Epilogue(scale, zero, torch.uint8, name, tuple(b * scale for b in bounds))
    simple = epilogue.in_codes()
    assert simple is not None and (simple.activation, simple.arguments) == expected
    real = torch.randn(1000, generator=generator) * 3
    assert torch.equal(definition.finish(real / scale, simple), definition.finish(real, epilogue))


def test_epilogues_that_have_no_bounds_in_codes() -> None:
    assert Epilogue(0.1, 0, torch.uint8, "silu").in_codes() is None
    assert Epilogue(1.0, 0, torch.float32, "relu").in_codes() is None
