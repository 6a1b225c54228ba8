"""Fake quantization by a range that stays, against the same with a range of each call."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.functional.kernel_cases import CASES, FORMATS, Case, bits, make
from torchq import QuantDescriptor, TensorQuantizer
from torchq.formats import CATALOG, PerAxis, PerTensor
from torchq.functional import FixedFakeQuantize, Range, fake_quantize
from torchq.functional import fixed as fixed_module

# float64 is computed in float64, so never by kept numbers.
_DTYPES = [torch.float32, torch.float16, torch.bfloat16]
_CASES = [case for case in CASES if "block" not in case.name]


def granularity_of(case: Case) -> Any:
    kept = [
        dim for dim, size in enumerate(case.amax_shape) if size == case.shape[dim] != 1
    ]
    return PerAxis(tuple(kept)) if kept else PerTensor()


def with_gradient(x: Tensor, function: Any) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    y = function(leaf)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    y.backward(grad)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def assert_same(x: Tensor, fixed: Any, function: Any) -> None:
    actual = with_gradient(x, fixed)
    expected = with_gradient(x, function)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype is b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(bits(a), bits(b))
    with torch.no_grad():
        assert torch.equal(
            bits(fixed(x)),
            bits(expected[0]),
        )


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("scales", [None, "power of two"])
def test_a_fixed_range_gives_the_same_bits(
    case: Case, scales: str | None, dtype: torch.dtype
) -> None:
    scale_format = fixed_module.POWER_OF_TWO if scales else None
    granularity = granularity_of(case)
    for name in FORMATS:
        x, amax = make(case, dtype)
        if amax.numel() != 1 and amax.shape != granularity.amax_shape(x.shape):
            continue
        settings = CATALOG[name], granularity, scale_format
        fixed = FixedFakeQuantize.of(Range(amax), x.shape, *settings)
        function = lambda t, amax=amax, s=settings: fake_quantize(t, amax, *s)  # noqa: E731
        assert_same(x, fixed, function)


@pytest.mark.sample(12)
@pytest.mark.parametrize("case", _CASES, ids=str)
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_a_fixed_range_of_two_ends_gives_the_same_bits(
    case: Case, dtype: torch.dtype
) -> None:
    granularity = granularity_of(case)
    for name in ("int8", "uint8", "int4"):
        for part in (0.0, 0.3, 2.0):
            x, amax = make(case, dtype)
            high = amax.clamp(max=100.0)
            low = -part * high
            settings = CATALOG[name], granularity, None
            fixed = FixedFakeQuantize.of(Range(high, low), x.shape, *settings)
            function = lambda t, low=low, high=high, s=settings: fake_quantize(  # noqa: E731
                t, high, *s, amin=low
            )
            assert_same(x, fixed, function)


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each time that a quantizer makes what its calls compute."""
    made: list[str] = []
    for name in ("_made_function", "_made_scale"):
        plain = getattr(TensorQuantizer, name)

        def noted(self: Any, *args: Any, plain: Any = plain, name: str = name) -> Any:
            made.append(name)
            return plain(self, *args)

        monkeypatch.setattr(TensorQuantizer, name, noted)
    return made


@pytest.mark.parametrize(
    "descriptor",
    [
        QuantDescriptor(8),
        QuantDescriptor(8, axis=0),
        QuantDescriptor(8, unsigned=True, symmetric=False),
        QuantDescriptor(4, axis=0, power_of_two=True),
        QuantDescriptor((4, 3), scale_amax=0.5),
    ],
    ids=str,
)
def test_what_a_range_decides_is_made_once_until_the_range_is_another(
    descriptor: QuantDescriptor, makings: list[str]
) -> None:
    x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))
    q = TensorQuantizer(descriptor)
    q.calibrate_on(x)
    leaf = x.clone().requires_grad_()
    first = q(leaf)
    assert torch.equal(first, q(leaf))
    assert makings == ["_made_function"]
    assert torch.equal(q.kept_scale(), q.scale)
    makings.clear()
    for change in (
        lambda: q.amax.data.mul_(1.5),
        lambda: q.amax.mul_(0.25),
        lambda: q.calibrate_on(x * 0.7),
        lambda: q.amax.data.view(-1)[0].copy_(
            q.amax.view(-1)[0].nextafter(torch.tensor(torch.inf))
        ),
    ):
        change()
        kept = q._kept_function
        q._kept_function = None
        expected = q(leaf)
        q._kept_function = kept
        assert torch.equal(q(leaf), expected)
        assert makings == ["_made_function"]
        assert torch.equal(q.kept_scale(), q.scale)
        assert makings == ["_made_function", "_made_scale"]
        makings.clear()
    q(leaf)
    assert makings == []
    assert not torch.equal(q(leaf), first)


def test_tensors_of_another_shape_or_dtype_are_not_quantized_by_kept_numbers() -> None:
    q = TensorQuantizer(QuantDescriptor(8, axis=0))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    q.calibrate_on(x)
    one = TensorQuantizer(QuantDescriptor(8, amax=1.0))
    for other in (x.double(), x.bfloat16(), x[:, :2], x.unsqueeze(2)[:, :, 0]):
        leaf = other.detach().requires_grad_()
        expected = fake_quantize(
            other,
            q.amax,
            CATALOG["int8"],
            PerAxis((0,)),
        )
        assert torch.equal(q(leaf), expected)
        assert q(leaf).dtype is other.dtype
        assert torch.equal(one(leaf), fake_quantize(other, 1.0))
    with pytest.raises(ValueError, match=r"amax has shape \(4, 1\)"):
        q(torch.randn(5, 3, requires_grad=True))


def test_a_gradient_to_the_range_or_a_transform_keeps_the_definition(
    makings: list[str],
) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    learned = TensorQuantizer(QuantDescriptor(8, amax=1.0, learn_amax=True))
    learned(x.requires_grad_()).sum().backward()
    assert isinstance(learned.amax, torch.nn.Parameter)
    assert learned.amax.grad is not None
    q = TensorQuantizer(QuantDescriptor(8, amax=1.0))
    grads = torch.func.vmap(torch.func.grad(lambda row: q(row).square().sum()))(x)
    assert makings == []
    # A weight is no batch, though a transform is active.
    weight = torch.ones(3, requires_grad=True)
    products = torch.func.vmap(lambda row: (q(weight) * row).sum())(x.detach())
    assert torch.equal(products, x.detach().sum(1))
    assert makings == ["_made_function"]
    products.sum().backward()
    assert torch.equal(weight.grad, x.detach().sum(0))
    makings.clear()
    q.amax.mul_(1.5)
    grads = torch.func.vmap(torch.func.grad(lambda row: q(row).square().sum()))(x)
    leaf = x.detach().requires_grad_()
    q(leaf).square().sum().backward()
    assert torch.equal(grads, leaf.grad)
    assert makings == ["_made_function"]
