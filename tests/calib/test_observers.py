"""What observers see of one tensor: magnitudes of groups, and negative values, by name."""

import warnings

import pytest
import torch
from torch import nn

import torchq
from torchq.calib import Calibrator
from torchq.formats import UINT8


def model(unsigned: bool) -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4))
    rule = torchq.Rule(
        "*",
        input=torchq.QuantDescriptor(unsigned=unsigned),
        weight=torchq.QuantDescriptor(axis=0),
    )
    torchq.quantize_(net, torchq.QuantConfig((rule,)))
    return net


@pytest.mark.parametrize("method", ["max", "entropy"])
def test_calibration_names_the_quantizer(method: str) -> None:
    batches = [
        torch.rand(3, 4),
        torch.rand(3, 4) - 0.5,
        torch.rand(3, 4),
    ]
    message = (
        r"0\.input_quantizer: got negative values in 1 of 3 batches; uint8 makes them 0"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        torchq.calibrate(model(True), batches, method=method, progress=False)
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("unsigned", "shift"),
    [(True, 0.0), (False, 0.5)],
)
def test_nothing_is_said_where_nothing_is_lost(unsigned: bool, shift: float) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchq.calibrate(
            model(unsigned),
            [torch.rand(3, 4) - shift],
            progress=False,
        )
    assert not caught


@pytest.mark.parametrize("method", ["max", "histogram"])
def test_negative_batches_add_up(method: str) -> None:
    calibrator = Calibrator(method, format=UINT8)
    for x in ([1.0, 2.0], [-1.0, 2.0], [-1.0, 2.0]):
        calibrator.collect(torch.tensor(x))
    assert calibrator.negative_batches == 2
    calibrator.reset()
    assert calibrator.observers[0].negative is None


@pytest.mark.parametrize("method", ["max", "moving_average", "histogram"])
def test_the_state_follows_the_data_to_another_device(method: str) -> None:
    calibrator = Calibrator(method)
    calibrator.collect(torch.rand(8))
    (observer,) = calibrator.observers
    observer.prepare(observer.shape, torch.device("meta"))
    state = [
        value for value in vars(observer).values() if isinstance(value, torch.Tensor)
    ]
    state += list(vars(observer).get("recent", ()))
    assert len(state) > 1
    assert {tensor.device.type for tensor in state} == {"meta"}


def test_histograms_have_2048_bins() -> None:
    calibrator = Calibrator("entropy")
    calibrator.collect(torch.rand(8))
    assert calibrator.histogram().counts.shape == (1, 2048)
