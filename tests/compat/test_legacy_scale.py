"""tensor_quant and fake_tensor_quant: the original's examples, and its arithmetic by the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from tests.contracts.quantize_contract import STORAGE, same, working
from tests.reference import round_to
from tests.reference import tensor_quant as oracle
from torchq.compat.pytorch_quantization.legacy_scale import (
    FakeTensorQuantFunction,
    TensorQuantFunction,
    fake_tensor_quant,
    tensor_quant,
)
from torchq.errors import ConfigError
from torchq.formats import integer

VECTORS = [
    (
        [-1, -0.5, 0, 0.26, 0.75, 1.2],
        1.0,
        (4, False, True),
        [-7, -4, 0, 2, 5, 7],
        [-1, -0.571429, 0, 0.285714, 0.714286, 1],
    ),
    ([0, 0.1, 0.5, 1.1], 1.0, (4, True, False), [0, 2, 8, 15], [0, 0.133333, 0.533333, 1]),
    ([-1.01, -1, 1], 1.0, (8, False, False), [-128, -127, 127], [-1.007874, -1, 1]),
    (
        [0.5, 1.5, 2.5, -0.5, -1.5, -2.5],
        127.0,
        (8, False, True),
        [0, 2, 2, 0, -2, -2],
        [0, 2, 2, 0, -2, -2],
    ),
    ([0.1, 0.3, 0.5], 0.5, (8, True, False), [51, 153, 255], [0.1, 0.3, 0.5]),
    ([5.0, -1.0, 0.0], 2.0**-24, (8, False, True), [0, 0, 0], [0, 0, 0]),
]


@pytest.mark.parametrize(("x", "amax", "flags", "codes", "fake"), VECTORS)
def test_hand_checked_vectors(
    x: list[float], amax: float, flags: tuple[int, bool, bool], codes: list[int], fake: list[float]
) -> None:
    got, scale = tensor_quant(torch.tensor(x, dtype=torch.float32), amax, *flags)
    assert got.tolist() == codes
    assert scale.item() == oracle(1.0, amax, *flags)[1]
    # 5e-7: the published values have six decimals
    torch.testing.assert_close(
        fake_tensor_quant(torch.tensor(x, dtype=torch.float32), amax, *flags),
        torch.tensor(fake, dtype=torch.float32),
        rtol=0,
        atol=5e-7,
    )


def test_per_channel_vector_with_a_dead_channel() -> None:
    x, amax = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0], [4.0]])
    codes, scale = tensor_quant(x, amax, narrow_range=True)
    assert codes.tolist() == [[0, 0], [95, 127]] and scale.tolist() == [[1.0], [31.75]]
    assert fake_tensor_quant(x, amax, narrow_range=True)[0].tolist() == [0, 0]
    torch.testing.assert_close(
        fake_tensor_quant(x, amax)[1], torch.tensor([2.992126, 4.0]), rtol=0, atol=5e-7
    )


def test_worked_example_of_the_ancestor() -> None:
    torch.manual_seed(12345)
    x = torch.rand(10)
    codes, scale = tensor_quant(x, x.abs().max())
    assert codes.tolist() == [126, 113, 127, 59, 11, 23, 47, 73, 43, 27]
    assert f"{scale.item():.4f}" == "128.0057"
    published = [0.9843313694, 0.8827733397, 0.9921435118, 0.4609170556, 0.0859336928]
    published += [0.1796795279, 0.3671712279, 0.5702872276, 0.3359225988, 0.2109281421]
    assert [round(v, 10) for v in fake_tensor_quant(x, x.abs().max()).tolist()] == published


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 5, 7, 8, 11])
def test_against_the_oracle(
    bits: int, unsigned: bool, narrow: bool, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """The tolerance is 0: the same operations in the same order are each rounded once."""
    x = torch.randn(40, generator=generator).to(dtype)
    amax = (x.abs().max() * 0.8).to(torch.float64 if dtype is torch.float64 else torch.float32)
    codes, scale = tensor_quant(x, amax, bits, unsigned, narrow)
    fake = fake_tensor_quant(x, amax, bits, unsigned, narrow)
    rows = [
        oracle(value, amax.item(), bits, unsigned, narrow, working(dtype)) for value in x.tolist()
    ]
    stored = STORAGE[dtype]
    assert same(
        codes, torch.tensor([round_to(float(code), stored) for code, _, _ in rows], dtype=dtype)
    )
    assert same(fake, torch.tensor([round_to(value, stored) for _, _, value in rows], dtype=dtype))
    assert scale.item() == rows[0][1] and scale.dtype is amax.dtype


@pytest.mark.parametrize("amax", [1.174e-3, 1e-6, 5.0])
def test_small_ranges_do_not_underflow_in_float16(amax: float) -> None:
    """The ancestor's scale overflows float16 below an amax of 1.94e-3 and everything becomes 0."""
    x = torch.tensor([amax, -amax / 2], dtype=torch.float16)
    codes, scale = tensor_quant(x, amax)
    assert codes.abs().tolist() == [127.0, oracle(abs(x[1].item()), amax)[0]]
    assert scale.isfinite() and bool((fake_tensor_quant(x, amax) != 0).all())


def test_poisoned_ranges_are_seen() -> None:
    for amax in (math.inf, math.nan):
        assert fake_tensor_quant(torch.ones(3), amax).isnan().all()


def test_empty_and_odd_inputs() -> None:
    assert tensor_quant(torch.empty(0, 3), 1.0, unsigned=True)[0].shape == (0, 3)
    assert fake_tensor_quant(torch.tensor(0.3), 1.0).shape == ()
    assert fake_tensor_quant(torch.tensor([-1e-8]), 1.0, unsigned=True).item() == 0.0
    y = fake_tensor_quant(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), 1.0)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(
        TypeError,
        match=r"tensor_quant: got a tensor of torch.int32; expected a floating-point tensor",
    ):
        fake_tensor_quant(torch.ones(2, dtype=torch.int32), 1.0)
    with pytest.raises(ConfigError, match="got 1 bits; expected 2 to 16 for signed"):
        tensor_quant(torch.ones(2), 1.0, 1)


def test_straight_through_mask_includes_the_boundary() -> None:
    for function in (fake_tensor_quant, lambda x, amax: tensor_quant(x, amax)[0]):
        x = torch.tensor([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], requires_grad=True)
        amax = torch.tensor(1.0, requires_grad=True)
        function(x, amax).mul(torch.arange(1.0, 8.0)).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [0, 2, 3, 4, 5, 6, 0]
        assert amax.grad is None


def test_scale_has_no_gradient() -> None:
    codes, scale = tensor_quant(
        torch.ones(2, requires_grad=True), torch.tensor(1.0, requires_grad=True)
    )
    assert codes.requires_grad and not scale.requires_grad


def test_function_classes_are_the_same_thing(generator: torch.Generator) -> None:
    x = torch.randn(5, generator=generator)
    assert same(
        FakeTensorQuantFunction.apply(x, torch.tensor(1.0), integer(4)),
        fake_tensor_quant(x, 1.0, 4),
    )
    assert same(
        TensorQuantFunction.apply(x, torch.tensor(1.0), integer(4))[0], tensor_quant(x, 1.0, 4)[0]
    )
