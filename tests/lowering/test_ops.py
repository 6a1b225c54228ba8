from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering import ACTIVATIONS
from torchq.lowering.ops import onednn, schemas

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
DEVICE_KERNELS = ["cpu", "any"]
ARGUMENTS = {"clamp": [-0.5, 0.7]}


def conv_case(
    dims: int, groups: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randint(0, 256, (2, 16, *[7] * dims), generator=generator).to(torch.uint8)
    weight = torch.randint(-128, 128, (32, 16 // groups, *[3] * dims), generator=generator).to(
        torch.int8
    )
    scale = torch.rand(32, generator=generator) * 1e-3 + 1e-4
    return x, weight, scale, torch.randn(32, generator=generator)


def expected_codes(real: Tensor, scale: float, zero: int) -> Tensor:
    return torch.round(real / scale + zero).clamp(0, 255)


def check(got: Tensor, real: Tensor, scale: float, zero: int) -> None:
    """Codes may differ by one where the exact value is within float32 rounding of a tie; floats by a few roundings of the sums."""
    if got.dtype is torch.uint8:
        difference = (got.double() - expected_codes(real, scale, zero)).abs()
        assert difference.max() <= 1
        assert (difference > 0).float().mean() < 0.01
    else:
        # Sums of up to 16 * 27 products of 255 * 128 scales of 1.1e-3 * 0.02: float32 keeps 2**-24 of that, a few times over.
        torch.testing.assert_close(got.double(), real, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("name", ["none", "relu", "clamp", "silu", "hardswish"])
def test_conv_equals_the_definition(
    kernel: str, dims: int, name: str, generator: torch.Generator
) -> None:
    run = torch.ops.torchq.int8_conv if kernel == "cpu" else schemas.conv_any
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
        static = ([stride] * dims, [padding] * dims, [1] * dims, groups)
        real = CONV[dims](x.double() - zero, weight.double(), None, *static) * 0.02
        real = real * scale.double().view(-1, *[1] * dims) + (
            bias.double().view(-1, *[1] * dims) if with_bias else 0
        )
        added: tuple[object, ...] = ()
        if with_residual:
            codes = torch.randint(0, 256, real.shape, generator=generator).to(torch.uint8)
            values = (codes.double() - 100) * 0.03
            real = real + values
            added = (codes, 0.03, 100) if out is torch.uint8 else (values.float(), 1.0, 0)
        real = ACTIVATIONS[name].function(real, *ARGUMENTS.get(name, []))
        output = (0.05, 128) if out is torch.uint8 else (1.0, 0)
        post = (*output, out, name, ARGUMENTS.get(name, []))
        got = run(x, weight, scale, bias if with_bias else None, 0.02, zero, *static, *post, *added)
        assert got.dtype is out
        check(got, real, *output)


@pytest.mark.parametrize("kernel", DEVICE_KERNELS)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_linear_equals_the_definition(kernel: str, name: str, generator: torch.Generator) -> None:
    run = torch.ops.torchq.int8_linear if kernel == "cpu" else schemas.linear_any
    for shape, zero, out, with_bias in itertools.product(
        ((64,), (5, 64), (2, 3, 64)), (0, 128), (torch.uint8, torch.float32), (True, False)
    ):
        x = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
        weight = torch.randint(-128, 128, (32, 64), generator=generator).to(torch.int8)
        scale = torch.rand(32, generator=generator) * 1e-3 + 1e-4
        bias = torch.randn(32, generator=generator) if with_bias else None
        real = F.linear(
            x.double() - zero,
            weight.double() * scale.double().view(-1, 1) * 0.02,
            None if bias is None else bias.double(),
        )
        real = ACTIVATIONS[name].function(real, *ARGUMENTS.get(name, []))
        output = (0.05, 128) if out is torch.uint8 else (1.0, 0)
        got = run(x, weight, scale, bias, 0.02, zero, *output, out, name, ARGUMENTS.get(name, []))
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
    args = (
        x,
        weight,
        scale,
        None,
        0.02,
        0,
        [1, 1],
        [1, 1],
        [1, 1],
        1,
        1.0,
        0,
        torch.float32,
        "relu",
        [],
    )
    residual = torch.randn(2, 32, 1, 1, generator=generator)
    without = torch.ops.torchq.int8_conv(*args[:-2], "none", [])
    torch.testing.assert_close(
        torch.ops.torchq.int8_conv(*args, residual), F.relu(without + residual)
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
    before = len(onednn.PACKED)
    post = (1.0, 0, torch.float32, "none", [])
    torch.ops.torchq.int8_linear(x, weight, torch.ones(16), None, 1.0, 0, *post)
    assert len(onednn.PACKED) == before + onednn.available()
    del weight
    assert len(onednn.PACKED) == before


def test_another_bias_with_the_same_weight_is_seen() -> None:
    x, weight, scale = (
        torch.ones(1, 32, dtype=torch.uint8),
        torch.ones(16, 32, dtype=torch.int8),
        torch.ones(16),
    )
    for value in (1.0, 2.0):
        y = torch.ops.torchq.int8_linear(
            x, weight, scale, torch.full((16,), value), 1.0, 0, 1.0, 0, torch.float32, "none", []
        )
        assert torch.equal(y, torch.full((1, 16), 32 + value))


@pytest.mark.parametrize("kind", ["conv", "linear"])
def test_one_weight_serves_any_settings(kind: str) -> None:
    """Bound kernels are kept for the operators: nothing that matters may be missing from what they are kept under."""
    x, weight, scale, bias = conv_case(2, 1, torch.Generator().manual_seed(0))
    rows, square = torch.randint(0, 256, (3, 16)).to(torch.uint8), weight[:, :, 0, 0].contiguous()
    static = (
        {
            "stride": [[1, 1], [2, 1]],
            "padding": [[0, 0], [1, 1]],
            "dilation": [[1, 1], [1, 2]],
            "groups": [1],
        }
        if kind == "conv"
        else {}
    )
    table = {
        "x_scale": [0.02, 0.01],
        "x_zero_point": [0, 128],
        **static,
        "out_scale": [0.3, 0.1],
        "out_zero_point": [0, 3],
        "out_dtype": [torch.uint8],
    }
    table |= {"activation": ["none", "relu", "clamp"], "arguments": [[0.0, 1.0], [-1.0, 1.0]]}
    for name, values in table.items():
        for value in values:
            settings = {key: found[0] for key, found in table.items()} | {name: value}
            settings["arguments"] = (
                settings["arguments"]
                if settings["activation"] == "clamp" or name == "arguments"
                else []
            )
            settings["activation"] = "clamp" if name == "arguments" else settings["activation"]
            got, expected = (
                (schemas.conv_cpu if kernel == "cpu" else schemas.conv_any)(
                    x, weight, scale, bias, **settings
                )
                if kind == "conv"
                else (schemas.linear_cpu if kernel == "cpu" else schemas.linear_any)(
                    rows, square, scale, bias, **settings
                )
                for kernel in DEVICE_KERNELS
            )
            assert (got.int() - expected.int()).abs().max() <= 1, (name, value)  # next to a tie
    if kind == "conv":
        for residual in (
            torch.zeros(2, 32, 5, 5),
            torch.ones(1, 32, 1, 1),
            torch.full((2, 32, 5, 5), 7, dtype=torch.uint8),
        ):
            for qparams in ((1.0, 0), (0.5, 0), (0.5, 3)):
                args = (
                    x,
                    weight,
                    scale,
                    bias,
                    0.02,
                    0,
                    [1, 1],
                    [0, 0],
                    [1, 1],
                    1,
                    0.3,
                    0,
                    torch.uint8,
                    "relu",
                    [],
                    residual,
                    *qparams,
                )
                assert (
                    schemas.conv_cpu(*args).int() - schemas.conv_any(*args).int()
                ).abs().max() <= 1
