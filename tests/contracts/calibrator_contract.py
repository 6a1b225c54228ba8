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

Make = Callable[..., Calibrator]

# (N, C, L); the granularities under test keep at most C.
SHAPE = (6, 4, 50)


def sample(generator: torch.Generator, *, count: int = SHAPE[0]) -> Tensor:
    """Normal values whose range rises from batch to batch and differs between channels."""
    x = torch.randn(count, *SHAPE[1:], generator=generator)
    return (
        x
        * torch.linspace(0.1, 9.0, count).view(-1, 1, 1)
        * torch.tensor([1.0, 0.01, 30.0, 1.0]).view(1, -1, 1)
    )


def collected(make: Make, *batches: Tensor) -> Calibrator:
    calibrator = make()
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


class CalibratorContract:
    """Tests of a calibrator.

    Fixtures: ``make()`` returns a fresh calibrator of amax shape () or (1, C, 1); ``sequential`` is
    True where the order of batches counts.
    """

    def test_amax_is_float32_of_the_right_shape_and_within_the_data(
        self, make: Make, generator: torch.Generator
    ) -> None:
        x = sample(generator)
        calibrator = collected(make, x)
        amax = calibrator.range().high
        assert amax.dtype is torch.float32
        assert amax.shape == calibrator.granularity.amax_shape(x.shape)
        assert ((amax > 0) & (amax <= calibrator.granularity.amax(x))).all()

    def test_collecting_leaves_the_input_alone(
        self, make: Make, generator: torch.Generator
    ) -> None:
        x = sample(generator)
        before = x.clone()
        collected(make, x)
        assert torch.equal(x, before)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
    def test_other_dtypes_equal_their_float32_copy(
        self, make: Make, generator: torch.Generator, dtype: torch.dtype
    ) -> None:
        x = sample(generator).to(dtype)
        assert same_bits(collected(make, x).range().high, collected(make, x.float()).range().high)

    def test_memory_layout_does_not_matter(self, make: Make, generator: torch.Generator) -> None:
        x = sample(generator)
        expected = collected(make, x).range().high
        views = [
            x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
            x.permute(0, 2, 1).contiguous().permute(0, 2, 1),
            x[:, :, ::1],
        ]
        sliced = torch.zeros(*SHAPE[:2], 2 * SHAPE[2])
        sliced[..., ::2] = x
        for view in [*views, sliced[..., ::2]]:
            assert same_bits(collected(make, view).range().high, expected)

    def test_splitting_into_batches_does_not_matter(
        self, make: Make, sequential: bool, generator: torch.Generator
    ) -> None:
        if sequential:
            pytest.skip("defined on the sequence of batches")
        x = sample(generator)
        expected = collected(make, x).range().high
        assert same_bits(collected(make, *x.split(1)).range().high, expected)
        assert same_bits(collected(make, *x.flip(0).split(4)).range().high, expected)

    def test_reset_equals_new(self, make: Make, generator: torch.Generator) -> None:
        x = sample(generator)
        calibrator = collected(make, 1e4 * x)
        calibrator.reset()
        assert not calibrator.seen
        assert calibrator.batches == 0
        calibrator.collect(x)
        assert same_bits(calibrator.range().high, collected(make, x).range().high)

    def test_computing_does_not_disturb_collecting(
        self, make: Make, generator: torch.Generator
    ) -> None:
        x = sample(generator)
        calibrator = collected(make, x[:3])
        amax = calibrator.range().high
        before = amax.clone()
        calibrator.collect(x[3:])
        assert torch.equal(amax, before)
        assert same_bits(calibrator.range().high, collected(make, x[:3], x[3:]).range().high)

    @pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-38, 3e38])
    def test_a_constant_is_its_own_range(self, make: Make, value: float) -> None:
        amax = collected(make, torch.full(SHAPE, value)).range().high
        assert torch.equal(amax, torch.full_like(amax, abs(value)))

    def test_a_subnormal_constant_is_its_own_range(self, make: Make) -> None:
        x = torch.full(SHAPE, 2.0**-149)
        amax = collected(make, x).range().high
        assert torch.equal(amax, x.amax().expand_as(amax))

    def test_one_element(self, make: Make) -> None:
        calibrator = collected(make, torch.full((1, 1, 1), -0.75))
        assert calibrator.range().high.flatten().tolist() == [0.75]

    def test_empty_batches_change_nothing(self, make: Make, generator: torch.Generator) -> None:
        x = sample(generator)
        calibrator = collected(make, x[:0])
        assert not calibrator.seen
        calibrator.collect(x)
        calibrator.collect(x[:0])
        assert calibrator.batches == 1
        assert same_bits(calibrator.range().high, collected(make, x).range().high)

    def test_nothing_collected_is_an_error(self, make: Make) -> None:
        with pytest.raises(
            CalibrationError, match="got no data; expected at least one collected tensor"
        ):
            make().range()

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_non_finite_values_are_an_error_until_reset(
        self, make: Make, generator: torch.Generator, value: float
    ) -> None:
        x = sample(generator)
        bad = x.clone()
        bad[2, 3, 4] = value
        calibrator = collected(make, x, bad, x)
        with pytest.raises(
            CalibrationError,
            match="got NaN or infinite values in 1 of 3 batches; expected finite data",
        ):
            calibrator.range()
        calibrator.reset()
        calibrator.collect(x)
        assert calibrator.range().high.isfinite().all()

    def test_integers_are_an_error(self, make: Make) -> None:
        with pytest.raises(
            CalibrationError, match=r"got a tensor of torch.int64; expected floating point"
        ):
            make().collect(torch.zeros(SHAPE, dtype=torch.int64))

    def test_unknown_method_and_option_are_errors(
        self, make: Make, generator: torch.Generator
    ) -> None:
        calibrator = collected(make, sample(generator))
        with pytest.raises(ConfigError, match="nonsense"):
            calibrator.range(method="nonsense")
        with pytest.raises(ConfigError, match="wrong"):
            calibrator.range(wrong=1)

    def test_copies_are_independent_and_equal(self, make: Make, generator: torch.Generator) -> None:
        x = sample(generator)
        calibrator = collected(make, x)
        expected = calibrator.range().high
        for twin in (copy.deepcopy(calibrator), pickle.loads(pickle.dumps(calibrator))):
            assert same_bits(twin.range().high, expected)
            twin.collect(100 * x)
            assert same_bits(calibrator.range().high, expected)

    def test_inference_mode_leaves_no_trace(self, make: Make, generator: torch.Generator) -> None:
        x = sample(generator)
        with torch.inference_mode():
            calibrator = collected(make, x.clone())
            inside = calibrator.range().high
        calibrator.collect(x)
        outside = calibrator.range().high
        assert not inside.is_inference()
        assert not outside.is_inference()
        assert same_bits(inside, collected(make, x).range().high)

    def test_no_gradient_is_recorded(self, make: Make, generator: torch.Generator) -> None:
        assert (
            not collected(make, sample(generator).requires_grad_() * 2).range().high.requires_grad
        )

    def test_collecting_never_reads_the_device(self, make: Make) -> None:
        # A meta tensor has no values, so any look at one would raise.
        calibrator = collected(make, *(torch.empty(SHAPE, device="meta") for _ in range(3)))
        assert calibrator.seen
        assert calibrator.batches == 3
        with pytest.raises(RuntimeError, match="meta"):
            calibrator.range()
