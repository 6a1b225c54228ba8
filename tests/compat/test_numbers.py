"""Values against the exact oracle: the legacy scale in fp32, rounded to the tensor's dtype once."""

import math

import pytest
import torch
from torch import Tensor

from tests import reference as ref
from torchq.compat.pytorch_quantization import cuda_ext, tensor_quant
from torchq.compat.pytorch_quantization.nn import TensorQuantizer
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

STORED = {
    torch.float32: ref.FLOAT32,
    torch.float16: ref.FLOAT16,
    torch.bfloat16: ref.BFLOAT16,
    torch.float64: ref.FLOAT64,
}
BITS = [2, 3, 4, 5, 7, 8, 11, 16]
BOOLS = [False, True]


def working(dtype: torch.dtype) -> ref.FloatSpec:
    return ref.FLOAT64 if dtype is torch.float64 else ref.FLOAT32


def data(dtype: torch.dtype, unsigned: bool, amax: float) -> Tensor:
    """Values on both sides of the range, its ends, and ties between codes of 4 and 8 bits."""
    generator = torch.Generator().manual_seed(3)
    ties = (torch.arange(-9, 9) + 0.5) / 7 * amax
    special = torch.tensor([0.0, -0.0, amax, -amax, 1e-9])
    x = torch.cat(
        [torch.randn(60, generator=generator) * amax, special, ties, ties * 7 / 127]
    )
    return (x.abs() if unsigned else x).to(dtype)


def expected(
    x: Tensor, amax: Tensor, bits: int, unsigned: bool, narrow: bool
) -> tuple[list[float], list[float]]:
    """Codes, and values as ``x``'s dtype stores them."""
    spec = working(x.dtype)
    pairs = zip(
        x.tolist(),
        amax.expand(x.shape).tolist(),
        strict=True,
    )
    rows = [ref.tensor_quant(v, a, bits, unsigned, narrow, spec) for v, a in pairs]
    stored = [ref.round_to(value, STORED[x.dtype]) for _, _, value in rows]
    return [float(code) for code, _, _ in rows], stored


@pytest.mark.parametrize("narrow", BOOLS)
@pytest.mark.parametrize("unsigned", BOOLS)
@pytest.mark.parametrize("bits", BITS)
def test_fake_tensor_quant(
    dtype: torch.dtype, bits: int, unsigned: bool, narrow: bool
) -> None:
    amax = torch.tensor(1.37)
    x = data(dtype, unsigned, 1.37)
    codes, values = expected(x, amax, bits, unsigned, narrow)
    for function in (
        tensor_quant.fake_tensor_quant,
        tensor_quant.legacy_fake_tensor_quant,
        tensor_quant.FakeTensorQuantFunction.apply,
    ):
        actual = function(x, amax, bits, unsigned, narrow)
        assert actual.dtype is dtype
        assert actual.double().tolist() == values
    options = {"unsigned": unsigned, "narrow_range": narrow}
    quantizer = TensorQuantizer(QuantDescriptor(bits, amax=1.37, **options))
    assert quantizer(x).double().tolist() == values
    actual, scale = tensor_quant.tensor_quant(x, amax, bits, unsigned, narrow)
    assert actual.double().tolist() == [
        ref.round_to(code, STORED[dtype]) for code in codes
    ]
    assert scale.dtype is dtype


def test_defaults_of_each_entry() -> None:
    """The functions are narrow by default, a descriptor is not."""
    x = torch.tensor([-2.0])
    assert tensor_quant.tensor_quant(x, 1.0)[0].item() == -127
    assert tensor_quant.fake_tensor_quant(x, 1.0).item() == -1.0
    assert (
        TensorQuantizer(QuantDescriptor(amax=1.0, fake_quant=False))(x).item() == -128
    )
    narrow = QuantDescriptor(amax=1.0, fake_quant=False, narrow_range=True)
    assert TensorQuantizer(narrow)(x).item() == -127


@pytest.mark.parametrize("axis", [0, 1, -1, (0,), (0, 2)])
@pytest.mark.parametrize("unsigned", BOOLS)
def test_per_axis_ranges_of_each_call(
    dtype: torch.dtype, axis: int | tuple[int, ...], unsigned: bool
) -> None:
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x.abs() if unsigned else x
    kept = {a % 3 for a in ((axis,) if isinstance(axis, int) else axis)}
    amax = (
        x.abs()
        .amax([d for d in range(3) if d not in kept], keepdim=True)
        .to(torch.float64)
    )
    flat = amax.expand(x.shape).reshape(-1)
    _, values = expected(x.reshape(-1), flat, 8, unsigned, False)
    actual = TensorQuantizer(QuantDescriptor(axis=axis, unsigned=unsigned))(x)
    assert actual.double().reshape(-1).tolist() == values


def test_dead_ranges_give_zero(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3, 4, dtype=dtype)
    amax = torch.tensor([1.0, 2.0**-24, 0.0]).reshape(1, 3, 1)
    actual = tensor_quant.fake_tensor_quant(x, amax)
    assert actual[:, 0].eq(1).all()
    assert actual[:, 1:].eq(0).all()
    assert cuda_ext.fake_tensor_quant_with_axis(x, amax.flatten(), 1).equal(actual)
    changed = x.clone()
    assert cuda_ext.fake_tensor_quant_(changed, amax) is changed
    assert changed.equal(actual)
    codes, scale = tensor_quant.tensor_quant(x.float(), amax)
    assert codes[0, :, 0].tolist() == [127, 0, 0]
    assert scale.flatten().tolist() == [
        127,
        1,
        1,
    ]


def test_small_ranges_in_half_precision_do_not_overflow(low_dtype: torch.dtype) -> None:
    """scale = 127 / 1e-4 is beyond fp16; the arithmetic is not done there."""
    x = torch.linspace(-1e-4, 1e-4, 9).to(low_dtype)
    amax = torch.tensor(1e-4).to(low_dtype).double()
    _, values = expected(x, amax, 8, False, True)
    assert (
        tensor_quant.fake_tensor_quant(x, amax.to(low_dtype)).double().tolist()
        == values
    )
    assert any(values)


def test_zero_bits_give_zero() -> None:
    x = torch.tensor([-1.0, 0.5])
    assert tensor_quant.fake_tensor_quant(x, 1.0, 0).tolist() == [0, 0]
    assert tensor_quant.tensor_quant(x, torch.tensor(1.0), 0)[0].tolist() == [0, 0]
    assert TensorQuantizer(QuantDescriptor(num_bits=0))(x).tolist() == [0, 0]


def test_gradient_mask_is_inclusive(dtype: torch.dtype) -> None:
    x = torch.tensor(
        [-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], dtype=dtype, requires_grad=True
    )
    weight = torch.arange(1.0, 8.0, dtype=dtype)
    wanted = (weight * (x.detach().abs() <= 1)).tolist()
    for call in (
        lambda: tensor_quant.fake_tensor_quant(x, torch.tensor(1.0)),
        lambda: tensor_quant.tensor_quant(x, torch.tensor(1.0))[0],
        lambda: tensor_quant.scaled_e4m3(x, torch.tensor(1.0)),
        lambda: tensor_quant.fake_affine_tensor_quant(
            x, torch.tensor(-1.0), torch.tensor(1.0)
        ),
        lambda: TensorQuantizer(QuantDescriptor(amax=1.0))(x),
    ):
        x.grad = None
        (call() * weight).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == wanted


def test_unsigned_maps_negative_values_to_zero() -> None:
    x = torch.tensor([-1.0, -1e-8, 0.5], requires_grad=True)
    actual = tensor_quant.fake_tensor_quant(x, torch.tensor(1.0), 8, True)
    assert actual[:2].tolist() == [0, 0]
    assert actual[2] > 0


@pytest.mark.parametrize("amax", [None, 2.0, 0.3])
def test_scaled_e4m3(dtype: torch.dtype, amax: float | None) -> None:
    special = torch.tensor([1e-9, 5e-8, 7e-8, 500.0, -460.0])
    x = torch.cat([torch.arange(-2, 2, 0.2), special]).to(dtype)
    spec = working(dtype)
    # Ranges are kept in fp32.
    stored = torch.tensor(448.0 if amax is None else amax).item()
    scale = ref.round_to(448 / ref.Fraction(stored), spec)
    wanted = []
    for value in x.tolist():
        product = ref.round_to(ref.Fraction(value) * ref.Fraction(scale), spec)
        code = ref.round_to(product, ref.E4M3, saturate=True)
        dequantized = ref.round_to(ref.Fraction(code) / ref.Fraction(scale), spec)
        wanted.append(
            0.0 if abs(value) < 2.0**-24 else ref.round_to(dequantized, STORED[dtype])
        )
    if amax is None:
        actual = tensor_quant.scaled_e4m3(x), cuda_ext.fake_e4m3fy(x)
    else:
        quantizer = TensorQuantizer(QuantDescriptor(num_bits=(4, 3), amax=amax))
        actual = tensor_quant.scaled_e4m3(x, torch.tensor(amax)), quantizer(x)
    assert all(values.double().tolist() == wanted for values in actual)


def test_published_e4m3_values() -> None:
    """Of the FP8 values that the original documents."""
    x = torch.tensor([-2.0, -1.8, -1.2, -0.6, 0.2, 0.8, 1.4, 1.8])
    published = [-2.0, -1.75, -1.25, -0.625, 0.203125, 0.8125, 1.375, 1.75]
    assert tensor_quant.scaled_e4m3(x).tolist() == published
    printed = torch.tensor(
        [-2.0, -1.8571, -1.1429, -0.5714, 0.1964, 0.7857, 1.4286, 1.8571]
    )
    actual = tensor_quant.scaled_e4m3(x, torch.tensor(2.0))
    torch.testing.assert_close(
        actual, printed, atol=5e-5, rtol=0
    )  # four printed digits


def test_fake_affine() -> None:
    """On its own grid the identity; elsewhere the nearest of 2**bits points from min to max."""
    grid = torch.tensor([-128.0, -101, -13, -1, 0, 2, 5, 13, 93, 127])
    affine = tensor_quant.fake_affine_tensor_quant
    assert affine(grid, grid.min(), grid.max()).tolist() == grid.tolist()
    x = torch.tensor([-1.0, -0.1, 0.0, 0.4, 0.7, 2.0, 9.0])
    # min 0, max 3, 2 bits: step 1
    assert affine(x, 0.0, 3.0, 2).tolist() == [0, 0, 0, 0, 1, 2, 3]
    assert affine(x, torch.tensor(1.0), torch.tensor(1.0)).isfinite().all()


SEVENTHS = [-1, -4 / 7, 0, 2 / 7, 5 / 7, 1]
HALVES = [0, 2, 2, 0, -2, -2]
VECTORS = [
    (
        [-1, -0.5, 0, 0.26, 0.75, 1.2],
        1.0,
        (4, False, True),
        [-7, -4, 0, 2, 5, 7],
        SEVENTHS,
    ),
    (
        [0, 0.1, 0.5, 1.1],
        1.0,
        (4, True, False),
        [0, 2, 8, 15],
        [0, 0.133333, 0.533333, 1],
    ),
    ([-1.01, -1, 1], 1.0, (8, False, False), [-128, -127, 127], [-1.007874, -1, 1]),
    ([0.5, 1.5, 2.5, -0.5, -1.5, -2.5], 127.0, (8, False, True), HALVES, HALVES),
    ([0.1, 0.3, 0.5], 0.5, (8, True, False), [51, 153, 255], [0.1, 0.3, 0.5]),
    ([5.0, -1.0, 0.0], 2.0**-24, (8, False, True), [0, 0, 0], [0, 0, 0]),
]


@pytest.mark.parametrize(("x", "amax", "flags", "codes", "fake"), VECTORS)
def test_hand_checked_vectors(
    x: list[float],
    amax: float,
    flags: tuple[int, bool, bool],
    codes: list[int],
    fake: list[float],
) -> None:
    given = torch.tensor(x, dtype=torch.float32)
    got, scale = tensor_quant.tensor_quant(given, amax, *flags)
    assert got.tolist() == codes
    assert scale.item() == ref.tensor_quant(1.0, amax, *flags)[1]
    actual = tensor_quant.fake_tensor_quant(given, amax, *flags)
    # 5e-7: the published values have six decimals
    torch.testing.assert_close(
        actual, torch.tensor(fake, dtype=torch.float32), rtol=0, atol=5e-7
    )


def test_worked_example_of_the_ancestor() -> None:
    torch.manual_seed(12345)
    x = torch.rand(10)
    codes, scale = tensor_quant.tensor_quant(x, x.abs().max(), narrow_range=False)
    assert codes.tolist() == [126, 113, 127, 59, 11, 23, 47, 73, 43, 27]
    assert f"{scale.item():.4f}" == "128.0057"
    published = [0.9843313694, 0.8827733397, 0.9921435118, 0.4609170556, 0.0859336928]
    published += [0.1796795279, 0.3671712279, 0.5702872276, 0.3359225988, 0.2109281421]
    actual = tensor_quant.fake_tensor_quant(x, x.abs().max(), narrow_range=False)
    assert [round(v, 10) for v in actual.tolist()] == published


def test_poisoned_ranges_are_seen() -> None:
    for amax in (math.inf, math.nan):
        assert tensor_quant.fake_tensor_quant(torch.ones(3), amax).isnan().all()
