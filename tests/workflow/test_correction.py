"""The correction of results: what calibration fits, beside the weights, and how it is undone."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import torchq
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import CalibrationError, ConfigError
from torchq.ptq import correct_bias_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 3 * 3, 5),
    ).eval()


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(64, 3, 8, 8, generator=generator) for _ in range(count)]


LAYERS = (0, 2, 5)
W3 = torchq.recipes.integer(3, 4)


def calibrated(config: QuantConfig, correct: bool = True) -> Any:
    return simulated(net(), batches(), config, correct=correct)


def rows(out: Tensor) -> Tensor:
    """Return results as (channels, positions) in float64."""
    return out.detach().movedim(-1 if out.dim() == 2 else 1, 0).flatten(1).double()


@torch.no_grad()
def test_the_own_error_of_each_layer_is_taken_back() -> None:
    """On what a layer reads without corrections its mean is that of the float layer."""
    floats = net()
    plain = calibrated(torchq.recipes.int8(), False)
    model = calibrated(torchq.recipes.int8())
    x = batches()[0]
    for i in LAYERS:
        read = plain[:i](x)
        expected = rows(floats[i](read)).mean(1)
        # The shift is float32, so a mean is exact to a few units in its last place.
        torch.testing.assert_close(
            rows(model[i](read)).mean(1), expected, rtol=0, atol=1e-6
        )
        assert (rows(plain[i](read)).mean(1) - expected).abs().max() > 1e-5
        assert not model[i].output_gain.numel()


@torch.no_grad()
def test_gains_and_shifts_are_least_squares_behind_corrected_layers() -> None:
    """Against numpy's fit of each channel, with the layers before it corrected."""
    floats = net()
    plain = calibrated(W3, False)
    model = calibrated(W3)
    x = batches()[0]
    for i in LAYERS:
        y = rows(floats[: i + 1](x))
        r = rows(plain[i](model[:i](x)))
        found = rows(model[: i + 1](x))
        for channel in range(len(y)):
            a = torch.stack([r[channel], torch.ones_like(r[channel])], 1)
            gain, shift = torch.linalg.lstsq(
                a, y[channel][:, None], driver="gelsd"
            ).solution[:, 0]
            if 0.5 < gain < 2:
                expected = gain * r[channel] + shift
                torch.testing.assert_close(
                    found[channel], expected, rtol=1e-5, atol=1e-5
                )
    error = [(m(x) - floats(x)).square().mean() for m in (plain, model)]
    assert error[1] < 0.9 * error[0]


@torch.no_grad()
def test_the_report_says_which_error_is_left_and_what_helps() -> None:
    """Errors are those of the model on the batch read; a gain cannot mend those of 2 bits."""
    floats = net()
    x = batches()[0]
    lines = {}
    for bits in (2, 4, 8):
        model = net()
        torchq.quantize_(model, torchq.recipes.integer(bits, bits))
        report = torchq.calibrate(model, batches(), progress=False)
        assert report.correction is not None
        lines[bits] = report.correction.line
        assert lines[bits] in str(report)
        for i in LAYERS if bits < 8 else ():
            y = rows(floats[: i + 1](x))
            found = rows(model[: i + 1](x))
            deviation = (y - y.mean(1, keepdim=True)).square().sum()
            left = ((y - found).square().sum() / deviation).sqrt().item()
            assert report.correction.errors[str(i)] == pytest.approx(left, rel=1e-4)
            assert (str(i) in report.correction.weak) == (left > 0.5)
    assert "gptq_(model, batches)" in lines[2]
    assert all("gptq_" not in lines[bits] for bits in (4, 8))


def test_weights_biases_and_parameters_stay() -> None:
    floats, model = net(), calibrated(W3)
    assert (
        dict(model.named_parameters()).keys() == dict(floats.named_parameters()).keys()
    )
    for one, other in zip(model.parameters(), floats.parameters(), strict=True):
        assert torch.equal(one, other)
    torchq.restore_(model)
    assert torch.equal(model(batches()[0]), floats(batches()[0]))
    assert model.state_dict().keys() == floats.state_dict().keys()


def test_it_can_be_switched_off_and_made_again() -> None:
    plain, model = calibrated(W3, False), calibrated(W3)
    x = batches()[0]
    before = model(x)
    assert not torch.equal(plain(x), before)
    report = torchq.calibrate(model, batches(), force=True, progress=False)
    assert torch.equal(model(x), before)
    assert "corrected gain and bias of 3 layers" in str(report)
    torchq.calibrate(model, batches(), force=True, correct=False, progress=False)
    assert torch.equal(model(x), plain(x))


def test_known_ranges_keep_their_corrections() -> None:
    model = calibrated(W3)
    before = model(batches()[0])
    with pytest.warns(UserWarning, match="keep their ranges"):
        torchq.calibrate(model, [2 * x for x in batches()], progress=False)
    assert torch.equal(model(batches()[0]), before)


def test_files_averages_and_copies_have_it(tmp_path: Path) -> None:
    model = calibrated(W3)
    x = batches()[0]
    expected = model(x)
    torchq.save(model, tmp_path / "m.pt")
    assert torch.equal(torchq.load(net(), tmp_path / "m.pt")(x), expected)
    fresh = net()
    torchq.quantize_(fresh, W3)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(x), expected)
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    assert torch.equal(average(x), expected)
    assert torch.equal(copy.deepcopy(model)(x), expected)


def test_a_checkpoint_without_corrections_removes_them() -> None:
    """As those of 0.2.0 are, which have no such keys."""
    plain, model = calibrated(W3, False), calibrated(W3)
    old = {k: v for k, v in plain.state_dict().items() if "output_" not in k}
    model.load_state_dict(old)
    assert torch.equal(model(batches()[0]), plain(batches()[0]))
    # A float checkpoint brings weights alone.
    model = calibrated(W3)
    before = model(batches()[0])
    model.load_state_dict(net().state_dict(), strict=False)
    assert torch.equal(model(batches()[0]), before)


def test_folding_a_norm_afterwards_keeps_what_is_computed() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    model[1].weight.data.uniform_(-2, 2)
    model.eval()
    simulated(model, batches(), torchq.recipes.w4a4())
    assert model[0].is_corrected
    expected = model(batches()[0])
    torchq.fuse_(model, batches()[0], progress=False)
    torch.testing.assert_close(model(batches()[0]), expected, rtol=1e-4, atol=1e-4)


def test_batches_that_are_read_once_are_named() -> None:
    model = net()
    torchq.quantize_(model, torchq.recipes.int8())
    with pytest.warns(
        UserWarning, match="can be read only once; expected a list or a loader"
    ):
        report = torchq.calibrate(model, iter(batches()), progress=False)
    assert report.correction is None and model[0].input_quantizer.calibrated
    model = net()
    torchq.quantize_(model, W3)
    with pytest.raises(ConfigError, match="Pass one, or correct=False"):
        torchq.calibrate(model, iter(batches()), progress=False)
    assert not model[0].input_quantizer.calibrated
    torchq.calibrate(model, iter(batches()), correct=False, progress=False)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Linear(4, 4, bias=False)
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.pair = nn.Bilinear(4, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(self.used(self.bare(x)))
        return self.pair(x, x)


def test_layers_that_are_left_alone_are_named() -> None:
    model = Parts()
    torchq.quantize_(model, torchq.recipes.integer(5, 5))
    data = [torch.rand(512, 4)]
    report = torchq.calibrate(model, data, on_unseen="disable", progress=False)
    assert report.correction is not None
    assert list(report.correction.layers) == ["used"]
    assert report.correction.skipped == {
        "bare": "it has no bias; fuse BatchNorm first",
        "unused": "no batch reached it",
        "pair": "it is no convolution or linear layer",
    }
    assert (
        "corrected bias of 1 layers, 3 not; used by the first of several calls"
        in str(report)
    )


def test_few_results_are_not_fitted_and_named() -> None:
    """The mean of so few errors is more wrong for other data than none at all."""
    model = net()
    torchq.quantize_(model, torchq.recipes.int8())
    report = torchq.calibrate(model, [batches()[0][:3]], progress=False)
    assert report.correction is not None
    few = "3 results of each channel are too few; pass more batches"
    assert report.correction.skipped["5"] == few
    assert not model[5].is_corrected


def test_ranges_that_clip_get_no_shift_without_a_gain() -> None:
    model = net()
    clipped = QuantDescriptor(calib_method="mse")
    torchq.quantize_(
        model, QuantConfig((Rule("*", input=clipped, weight=QuantDescriptor(axis=0)),))
    )
    report = torchq.calibrate(model, batches(), progress=False)
    assert report.correction is not None and not report.correction.layers
    assert set(report.correction.skipped.values()) == {
        "its ranges may clip, which shifts alone do not mend"
    }


def test_a_failed_correction_leaves_the_one_before() -> None:
    model = calibrated(W3)
    before = model(batches()[0])
    x = batches()[0].clone()
    x[0, 0, 0, 0] = float("nan")
    with pytest.raises(
        CalibrationError, match="correction of results: 0: got NaN or infinite"
    ):
        correct_bias_(model, [x], progress=False)
    assert torch.equal(model(batches()[0]), before)

    def stop(module: nn.Module, *_: Any) -> None:
        raise KeyboardInterrupt

    handle = model[5].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        torchq.calibrate(model, batches(), force=True, progress=False)
    handle.remove()
    assert torch.equal(model(batches()[0]), before)


@pytest.mark.parametrize("gains", [True, False])
def test_bias_correction_is_the_same_algorithm_in_order(gains: bool) -> None:
    floats = net()
    model = calibrated(torchq.recipes.integer(3, 8), False)
    report = correct_bias_(model, iter(batches()), gains=gains, progress=False)
    assert list(report.layers) == ["0", "2", "5"] and report.gains is gains
    x = torch.cat(batches())
    for i in LAYERS:
        expected = rows(floats[: i + 1](x)).mean(1)
        # Each batch moves the layers behind; the last one has seen two thirds before it.
        torch.testing.assert_close(
            rows(model[: i + 1](x)).mean(1), expected, rtol=0, atol=3e-3
        )
    again = calibrated(torchq.recipes.integer(3, 8), False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        correct_bias_(again, batches(5), gains=gains, num_batches=3, progress=False)
    assert torch.equal(again(x), model(x))


def test_a_model_without_biases_cannot_be_corrected() -> None:
    model = simulated(
        nn.Sequential(nn.Linear(4, 4, bias=False)),
        [torch.rand(2, 4)],
        torchq.recipes.int8(),
    )
    with pytest.raises(
        ConfigError, match=r"got no layer to correct \(0: it has no bias"
    ):
        correct_bias_(model, [torch.rand(2, 4)], progress=False)


@pytest.mark.parametrize(
    "config", [torchq.recipes.int8(), W3], ids=["own errors", "in order"]
)
def test_an_interrupted_correction_restores_everything(config: QuantConfig) -> None:
    """Wherever it is interrupted: while ranges are found, or in each run of the correction."""
    model = calibrated(config)
    x = batches()[0]
    before = model(x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    left = 0

    def stop(module: nn.Module, *_: Any) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    handle = model[2].register_forward_hook(stop)
    for run in range(1, 40):
        left = run
        try:
            # Other data, which give other ranges and corrections.
            torchq.calibrate(
                model, [3 * b for b in batches()], force=True, progress=False
            )
        except KeyboardInterrupt:
            assert torch.equal(model(x), before)
            assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        else:
            break
    handle.remove()
    assert run > 4 and left > 0
    assert not torch.equal(model(x), before)
