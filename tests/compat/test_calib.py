"""Legacy calibrators: definitions, growth, edge cases."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from torchq.compat.pytorch_quantization import calib, tensor_quant
from torchq.compat.pytorch_quantization import nn as quant_nn
from torchq.compat.pytorch_quantization.calibrators import _Calibrator


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_max_over_batches_and_reset() -> None:
    calibrator = calib.MaxCalibrator(8, None, True)  # counts magnitudes all the same
    assert calibrator.compute_amax() is None
    assert calibrator._calib_amax is None
    batches = [draw(129), draw(127, seed=1), torch.tensor([-9, 3])]
    for batch in batches:
        calibrator.collect(batch)
    assert calibrator.compute_amax() == calibrator._calib_amax == 9
    calibrator.reset()
    assert calibrator.compute_amax() is None
    calibrator.collect(batches[0])
    assert calibrator.compute_amax() == batches[0].abs().max()


def test_max_per_axis() -> None:
    calibrator = calib.MaxCalibrator(8, 0, False)
    x = draw(5, 3, 2)
    y = draw(5, 3, 2, seed=1)
    calibrator.collect(x)
    calibrator.collect(y)
    expected = torch.maximum(x.abs(), y.abs()).amax((1, 2), keepdim=True)
    assert calibrator.compute_amax().equal(expected)
    with pytest.raises(RuntimeError, match="shape changed"):
        calibrator.collect(draw(6, 3, 2))


def test_tracked_ranges_are_copies() -> None:
    calibrator = calib.MaxCalibrator(8, None, False, track_amax=True)
    batches = [
        torch.tensor([1.0, -2.0]),
        torch.tensor([5.0]),
        torch.tensor([3.0]),
    ]
    for batch in batches:
        calibrator.collect(batch)
    assert [float(amax) for amax in calibrator.amaxs] == [2, 5, 3]
    assert all(isinstance(amax, np.ndarray) for amax in calibrator.amaxs)
    assert calib.MaxCalibrator(8, None, False).amaxs == []


def test_custom_calibrators_derive_from_the_base() -> None:
    class Mine(_Calibrator):
        def collect(self, x: torch.Tensor) -> None:
            self.seen = x.mean()

        def compute_amax(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.seen * kwargs["factor"]

    quantizer = quant_nn.TensorQuantizer(if_calib=True)
    quantizer._calibrator = Mine(8, None, False)
    quantizer(torch.tensor([1.0, 3.0]))
    quantizer.load_calib_amax(factor=2.0)
    assert quantizer.amax == 4
    with pytest.raises(NotImplementedError):
        _Calibrator(8, None, False).reset()


def numpy_histogram(
    batches: list[np.ndarray], num_bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins of the original: the range of the first batch, then more of that width."""
    first = np.abs(batches[0])
    edges = np.linspace(0, first.max(), num_bins + 1)
    counts = np.zeros(num_bins, dtype=np.int64)
    for batch in batches:
        x = np.abs(batch).astype(np.float64)
        width = edges[1]
        if x.max() > edges[-1]:
            edges = np.arange(int(np.ceil(x.max() / width)) + 1) * width
            counts = np.pad(counts, (0, len(edges) - 1 - len(counts)))
        counts = counts + np.histogram(x, bins=edges)[0]
    return counts, edges


@pytest.mark.parametrize("torch_hist", [True, False])
def test_histogram_of_growing_batches(torch_hist: bool) -> None:
    options: Any = {"num_bins": 19, "grow_method": "append", "torch_hist": torch_hist}
    calibrator = calib.HistogramCalibrator(8, None, False, **options)
    generators = [torch.Generator().manual_seed(seed) for seed in range(6)]
    batches = [
        torch.rand(1023, generator=g) + seed % 2 for seed, g in enumerate(generators)
    ]
    for batch in batches:
        calibrator.collect(batch)
    counts, edges = numpy_histogram([batch.numpy() for batch in batches], 19)
    assert calibrator._calib_hist.tolist() == counts.tolist()
    actual = calibrator._calib_bin_edges.numpy()
    # Fp32 products of the bin width.
    np.testing.assert_allclose(actual, edges, rtol=1e-6)
    assert calibrator._calib_hist.numel() == len(actual) - 1 == calibrator._num_bins


def divergences(counts: np.ndarray, levels: int, stops: range) -> list[float]:
    """Entropy's score for each number of bins kept, bin by bin from the definition."""
    bins = counts.astype(np.float64)
    bins[0] = bins[1]
    scores = []
    for stop in stops:
        run_of = [int(np.floor(i * levels / stop)) for i in range(stop)]
        quantized = np.zeros(stop)
        for run in set(run_of):
            inside = [i for i in range(stop) if run_of[i] == run and bins[i] > 0]
            for i in inside:
                quantized[i] = sum(bins[j] for j in inside) / len(inside)
        reference = bins[:stop].copy()
        reference[-1] += bins[stop:].sum()
        p = reference / reference.sum()
        q = quantized / max(quantized.sum(), 1)
        with np.errstate(divide="ignore"):
            scores.append(float(np.sum(p[p > 0] * np.log(p[p > 0] / q[p > 0]))))
    return scores


@pytest.mark.parametrize(
    ("bits", "unsigned", "stride", "start"),
    [(8, False, 1, 128), (8, True, 3, 128), (4, False, 7, 100), (4, True, 1, 20)],
)
@pytest.mark.parametrize("relu", [False, True])
def test_entropy_is_the_definition(
    bits: int, unsigned: bool, stride: int, start: int, relu: bool
) -> None:
    x = draw(3000, seed=bits)
    x = x.relu() if relu else x
    calibrator = calib.HistogramCalibrator(bits, None, unsigned, num_bins=160)
    calibrator.collect(x)
    counts = calibrator._calib_hist.clone()
    stops = range(start, 161, stride)
    scores = divergences(
        counts.numpy(),
        1 << (bits - 1 + unsigned),
        stops,
    )
    least = min(scores) * (1 + 1e-12)
    best = max(
        stop for stop, score in zip(stops, scores, strict=True) if score <= least
    )
    actual = calibrator.compute_amax("entropy", stride=stride, start_bin=start)
    assert actual == calibrator._calib_bin_edges[best]
    assert calibrator._calib_hist.equal(counts)  # looking changes nothing


@pytest.mark.parametrize(
    ("bits", "unsigned"),
    [(8, False), (8, True), (4, False), ((4, 3), False), (0, False)],
    ids=str,
)
def test_mse_is_the_definition(bits: Any, unsigned: bool) -> None:
    x = torch.cat([draw(2000), torch.tensor([6.0])])
    calibrator = calib.HistogramCalibrator(bits, None, unsigned, num_bins=200)
    calibrator.collect(x)
    edges = calibrator._calib_bin_edges
    counts = calibrator._calib_hist.double()
    centers = (edges[1:] + edges[:-1]) / 2

    def error(amax: torch.Tensor) -> float:
        """Round by the functions that tests/compat/test_numbers.py compares with the oracle."""
        if isinstance(bits, tuple):
            rounded = tensor_quant.scaled_e4m3(centers, amax)
        else:
            rounded = tensor_quant.fake_tensor_quant(centers, amax, bits, unsigned)
        return float((rounded - centers).double().square() @ counts)

    best = min(
        range(128, 200, 5),
        key=lambda i: error(centers[i]),
    )
    assert (
        calibrator.compute_amax("mse", start_bin=128, stride=5).item() == centers[best]
    )


HUNDRED = torch.arange(100)
WITH_ZEROS = [torch.tensor([0, 0, 1, 2, 3, 4, 5]), torch.tensor([0, 6, 7, 8, 9, 10])]


@pytest.mark.parametrize(
    ("batches", "options", "percentile", "near", "within"),
    [
        ([HUNDRED], {}, 90, 89, 100 / 1024),
        ([HUNDRED], {"unsigned": True}, 80, 79, 100 / 2048),
        ([HUNDRED, torch.arange(0, 50, 0.5)], {}, 99, 97, 100 / 1024),
        (WITH_ZEROS, {"skip_zeros": True}, 50, 5, 10 / 2048),
        ([HUNDRED], {}, 0, 0, 0),
    ],
)
def test_percentiles(
    batches: list[torch.Tensor],
    options: Any,
    percentile: float,
    near: float,
    within: float,
) -> None:
    """``within`` is about a bin: the answer is the lower edge of one."""
    calibrator = calib.HistogramCalibrator(8, None, **{"unsigned": False, **options})
    for batch in batches:
        calibrator.collect(batch)
    assert (
        abs(calibrator.compute_amax("percentile", percentile=percentile).item() - near)
        <= within
    )


LINEAR = torch.nn.Linear(1, 1)


def of_fp8() -> calib.HistogramCalibrator:
    calibrator = calib.HistogramCalibrator((4, 3), None, False)
    calibrator.collect(torch.arange(100))
    return calibrator


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.compute_amax("percentile", percentile=-10), ValueError, "range"),
        (lambda c: c.compute_amax("percentile", percentile=200), ValueError, "range"),
        (
            lambda c: of_fp8().compute_amax("entropy"),
            ValueError,
            "expected an integer format",
        ),
        (
            lambda c: c.compute_amax("best"),
            TypeError,
            "Unknown calibration method 'best'",
        ),
        (
            lambda c: c.compute_amax("mse", start_bin=4000),
            ValueError,
            "start_bin: got 4000",
        ),
        (
            lambda c: c.collect(torch.tensor([1.0, torch.nan])),
            RuntimeError,
            "NaN or infinite",
        ),
        (
            lambda c: c.collect(torch.tensor([-torch.inf])),
            RuntimeError,
            "NaN or infinite",
        ),
        (
            lambda c: calib.HistogramCalibrator(8, 0, False),
            NotImplementedError,
            "axis=0; expected",
        ),
        (
            lambda c: calib.calibrate_weights(LINEAR, method="best"),
            TypeError,
            "Unsupported calibr",
        ),
    ],
)
def test_histogram_errors(call: Any, error: type[Exception], text: str) -> None:
    calibrator = calib.HistogramCalibrator(8, None, False)
    calibrator.collect(torch.arange(100))
    with pytest.raises(error, match=text):
        call(calibrator)
    assert calibrator._calib_hist.sum() == 100


def test_zeros_nothing_and_tiny_values() -> None:
    calibrator = calib.HistogramCalibrator(8, None, False)
    assert calibrator.compute_amax("entropy") is None
    calibrator.collect(torch.empty(0))
    assert calibrator.compute_amax("mse") is None
    calibrator.collect(torch.zeros(7))
    assert calibrator.compute_amax("percentile") == 0
    calibrator.collect(torch.tensor([1e-30, 2.0]))
    assert calibrator._calib_hist.sum() == 9
    assert calibrator._calib_hist[0] == 8
    calibrator.reset()
    assert calibrator.compute_amax("entropy") is None
    skipping = calib.HistogramCalibrator(8, None, False, skip_zeros=True)
    skipping.collect(torch.zeros(7))
    assert skipping.compute_amax("percentile") is None


def test_a_range_that_explodes_keeps_the_histogram_small() -> None:
    calibrator = calib.HistogramCalibrator(8, None, False)
    calibrator.collect(torch.linspace(0, 1e-3, 1000))
    calibrator.collect(torch.linspace(0, 1e6, 1000))
    assert calibrator._calib_hist.numel() <= 8 * 2048
    assert calibrator._calib_hist.sum() == 2000
    assert calibrator._calib_bin_edges[-1] >= 1e6
    amax = calibrator.compute_amax("percentile", percentile=75)
    # A thousandth is the distance of the data.
    assert amax == pytest.approx(5e5, rel=2 / 1000)


def test_counts_do_not_saturate_in_float32() -> None:
    calibrator = calib.HistogramCalibrator(8, None, False)
    many = torch.ones(1).expand((1 << 24) + 3)
    calibrator.collect(many)
    assert calibrator._calib_hist[-1] == (1 << 24) + 3


def test_collecting_leaves_the_tensor_alone(dtype: torch.dtype) -> None:
    x = draw(30).to(dtype).requires_grad_()
    before = x.detach().clone()
    for kind in (calib.MaxCalibrator, calib.HistogramCalibrator):
        calibrator = kind(8, None, False)
        calibrator.collect(x)
        amax = calibrator.compute_amax()
        assert not amax.requires_grad
        assert amax.dtype is torch.float32
        assert amax.shape == ()
        assert repr(calibrator)
        assert str(copy.deepcopy(calibrator)) == str(calibrator)
    assert x.detach().equal(before)


def layers() -> torch.nn.Sequential:
    convolutions = quant_nn.QuantConv2d(3, 5, 3), quant_nn.QuantConvTranspose2d(4, 6, 2)
    linear = quant_nn.QuantLinear(7, 8), quant_nn.QuantLinear(4, 1)
    return torch.nn.Sequential(*convolutions, *linear)


@pytest.mark.parametrize("method", ["max", "mse", "percentile"])
@pytest.mark.parametrize("perchannel", [True, False])
def test_calibrate_weights(method: str, perchannel: bool) -> None:
    model = layers()
    calib.calibrate_weights(
        model, method=method, perchannel=perchannel, percentile=99.0
    )
    for module in model:
        weight = module.weight
        amax = module.weight_quantizer.amax
        axis = 1 if module.weight.shape == (4, 6, 2, 2) else 0
        parts = list(weight.unbind(axis)) if perchannel else [weight]
        for part, actual in zip(parts, amax.flatten(), strict=True):
            if method == "max":
                assert actual == part.abs().max()
                continue
            calibrator = calib.HistogramCalibrator(8, None, False)
            calibrator.collect(part)
            assert actual == calibrator.compute_amax(method, percentile=99.0)
        if perchannel and len(parts) > 1:
            shape = [size if d == axis else 1 for d, size in enumerate(weight.shape)]
            assert list(amax.shape) == shape
    assert all(module.input_quantizer.amax is None for module in model)
    assert model[2](torch.randn(2, 7)).shape == (2, 8)
