"""The promises of every calibrator, as tests to inherit.

A subclass provides the fixtures ``make`` and ``sequential``.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from torchq.calib import Calibrator
from torchq.errors import CalibrationError, ConfigError
from torchq.functional import Range

Make = Callable[..., Calibrator]

# (N, C, L); the granularities under test keep at most C.
SHAPE = (6, 4, 50)


def sample(generator: torch.Generator, *, count: int = SHAPE[0]) -> Tensor:
    """Normal values whose range rises from batch to batch and differs between channels."""
    x = torch.randn(count, *SHAPE[1:], generator=generator)
    rising = torch.linspace(0.1, 9.0, count).view(-1, 1, 1)
    return x * rising * torch.tensor([1.0, 0.01, 30.0, 1.0]).view(1, -1, 1)


def collected(make: Make, *batches: Tensor) -> Calibrator:
    calibrator = make()
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def found(make: Make, *batches: Tensor) -> Range:
    return collected(make, *batches).range()


def same_bits(a: Range, b: Range) -> bool:
    """Return True if two ranges have the same ends, bit for bit."""
    return [name for name, _ in a.ends()] == [name for name, _ in b.ends()] and all(
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one, other)
        for (_, one), (_, other) in zip(a.ends(), b.ends(), strict=True)
    )


class CalibratorContract:
    """Tests of a calibrator.

    Fixtures: ``make()`` returns a fresh calibrator of amax shape () or (1, C, 1); ``sequential`` is
    True where the order of batches counts.
    """

    @pytest.fixture
    def x(self, generator: torch.Generator) -> Tensor:
        return sample(generator)

    def test_ends_are_float32_of_the_right_shape_and_within_the_data(
        self, make: Make, x: Tensor
    ) -> None:
        before = x.clone()
        calibrator = collected(make, x)
        assert torch.equal(x, before)
        range_ = calibrator.range()
        whole = Range.of(x, calibrator.granularity, symmetric=False)
        largest = calibrator.granularity.amax(x) if range_.low is None else whole.high
        assert (range_.low is None) == calibrator.symmetric
        for _, end in range_.ends():
            assert end.dtype is torch.float32
            assert end.shape == calibrator.granularity.amax_shape(x.shape)
        assert ((range_.high > 0) & (range_.high <= largest)).all()
        if range_.low is not None and whole.low is not None:
            assert ((range_.low < 0) & (range_.low >= whole.low)).all()

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_other_dtypes_equal_their_float32_copy(
        self, make: Make, x: Tensor, dtype: torch.dtype
    ) -> None:
        assert same_bits(
            found(make, x.to(dtype)),
            found(make, x.to(dtype).float()),
        )

    def test_memory_layout_does_not_matter(self, make: Make, x: Tensor) -> None:
        expected = found(make, x)
        sliced = torch.zeros(*SHAPE[:2], 2 * SHAPE[2])
        sliced[..., ::2] = x
        for view in (
            x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            x.permute(0, 2, 1).contiguous().permute(0, 2, 1),
            sliced[..., ::2],
        ):
            assert same_bits(found(make, view), expected)

    def test_splitting_into_batches_does_not_matter(
        self, make: Make, sequential: bool, x: Tensor
    ) -> None:
        if sequential:
            pytest.skip("defined on the sequence of batches")
        expected = found(make, x)
        assert same_bits(found(make, *x.split(1)), expected)
        assert same_bits(found(make, *x.flip(0).split(4)), expected)

    def test_reset_equals_new(self, make: Make, x: Tensor) -> None:
        calibrator = collected(make, 1e4 * x)
        calibrator.reset()
        assert not calibrator.seen
        assert calibrator.batches == 0
        calibrator.collect(x)
        assert same_bits(calibrator.range(), found(make, x))

    def test_computing_does_not_disturb_collecting(self, make: Make, x: Tensor) -> None:
        calibrator = collected(make, x[:3])
        range_ = calibrator.range()
        before = range_.map(torch.clone)
        calibrator.collect(x[3:])
        assert same_bits(range_, before)
        assert same_bits(
            calibrator.range(),
            found(make, x[:3], x[3:]),
        )

    @pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-38, 3e38, 2.0**-149])
    def test_a_constant_is_its_own_range(self, make: Make, value: float) -> None:
        for shape in (SHAPE, (1, 1, 1)):
            x = torch.full(shape, value)
            high, low = found(make, x)
            expected = x.amax().abs() if low is None else x.amax().clamp(min=0)
            assert torch.equal(high, expected.expand_as(high))
            assert low is None or torch.equal(low, x.amin().clamp(max=0).expand_as(low))

    def test_empty_batches_change_nothing(self, make: Make, x: Tensor) -> None:
        calibrator = collected(make, x[:0])
        assert not calibrator.seen
        calibrator.collect(x)
        calibrator.collect(x[:0])
        assert calibrator.batches == 1
        assert same_bits(calibrator.range(), found(make, x))

    def test_nothing_collected_is_an_error(self, make: Make) -> None:
        expected = "got no data; expected at least one collected tensor"
        with pytest.raises(CalibrationError, match=expected):
            make().range()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_values_are_an_error_until_reset(
        self, make: Make, x: Tensor, value: float
    ) -> None:
        bad = x.clone()
        bad[2, 3, 4] = value
        calibrator = collected(make, x, bad, x)
        expected = "got NaN or infinite values in 1 of 3 batches; expected finite data"
        with pytest.raises(CalibrationError, match=expected):
            calibrator.range()
        calibrator.reset()
        calibrator.collect(x)
        assert calibrator.range().high.isfinite().all()

    def test_integers_are_an_error(self, make: Make) -> None:
        expected = r"got a tensor of torch.int64; expected floating point"
        with pytest.raises(CalibrationError, match=expected):
            make().collect(torch.zeros(SHAPE, dtype=torch.int64))

    def test_unknown_method_and_option_are_errors(self, make: Make, x: Tensor) -> None:
        calibrator = collected(make, x)
        with pytest.raises(ConfigError, match="nonsense"):
            calibrator.range(method="nonsense")
        with pytest.raises(ConfigError, match="wrong"):
            calibrator.range(wrong=1)

    def test_copies_are_independent_and_equal(self, make: Make, x: Tensor) -> None:
        calibrator = collected(make, x)
        expected = calibrator.range()
        for twin in (copy.deepcopy(calibrator), pickle.loads(pickle.dumps(calibrator))):
            assert same_bits(twin.range(), expected)
            twin.collect(100 * x)
            assert same_bits(calibrator.range(), expected)

    def test_inference_mode_and_gradients_leave_no_trace(
        self, make: Make, x: Tensor
    ) -> None:
        with torch.inference_mode():
            calibrator = collected(make, x.clone())
            inside = calibrator.range()
        calibrator.collect(x)
        for _, end in (*inside.ends(), *calibrator.range().ends()):
            assert not end.is_inference()
        assert same_bits(inside, found(make, x))
        assert not found(make, x.requires_grad_() * 2).high.requires_grad

    def test_collecting_never_reads_the_device(self, make: Make) -> None:
        # A meta tensor has no values, so any look at one would raise.
        calibrator = collected(
            make, *(torch.empty(SHAPE, device="meta") for _ in range(3))
        )
        assert calibrator.seen
        assert calibrator.batches == 3
        with pytest.raises(RuntimeError, match="meta"):
            calibrator.range()
