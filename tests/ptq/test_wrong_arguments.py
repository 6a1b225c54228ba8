"""Wrong arguments of algorithms are named before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq.errors import ConfigError

X = torch.randn(4, 3, 8, 8)


def calibrated() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)
    model = nn.Sequential(*layers).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [X], progress=False)
    return model


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(model: nn.Module, batches: Any, *, num_batches: Any, progress: bool) -> Any:
        options = torchq.ptq.RunOptions(num_batches=num_batches)
        if function is torchq.ptq.smooth_:  # It comes before calibration.
            torchq.restore_(model)
            torchq.quantize_(model)
        return function(model, batches, run=options, progress=progress)

    return run


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "correct_bias_": torchq.ptq.correct_bias_,
    "gptq_": with_options(torchq.ptq.gptq_),
    "smooth_": with_options(torchq.ptq.smooth_),
    "reestimate_bn_": torchq.qat.reestimate_bn_,
    "sensitivity": torchq.sensitivity,
    "layer_errors": torchq.layer_errors,
}


@pytest.mark.parametrize("count", [0, -1, "2", 1.5, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_of_batches_that_are_none_are_named(name: str, count: Any) -> None:
    text = f"got num_batches={count!r}; expected an integer of at least 1, or None"
    with pytest.raises(ConfigError, match=text):
        FUNCTIONS[name](calibrated(), [X], num_batches=count, progress=False)


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (lambda: 1.0, "a metric that cannot be called with a model alone"),
        (lambda model, batches: 1.0, "missing a required argument: 'batches'"),
        (0.5, "a metric that cannot be called with a model alone"),
        (lambda model: None, "the metric returned a NoneType; expected a number"),
        (lambda model: model(X), "the metric returned a Tensor; expected a number"),
    ],
)
def test_a_metric_of_another_form_is_named(metric: Any, text: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    with pytest.raises(ConfigError, match=text):
        torchq.tune(model, [X], metric, max_drop=0.1, progress=False)
