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


def smoothed(model: nn.Module, batches: Any, **arguments: Any) -> Any:
    torchq.restore_(model)  # It comes before calibration.
    torchq.quantize_(model)
    return torchq.ptq.smooth_(model, batches, **arguments)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "correct_bias_": torchq.ptq.correct_bias_,
    "gptq_": torchq.ptq.gptq_,
    "adaround_": torchq.ptq.adaround_,
    "smooth_": smoothed,
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


ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (torchq.ptq.gptq_, {"target": "magic"}, "got target='magic'; expected one of weight, layer"),
    (torchq.ptq.gptq_, {"damping": 0}, "got damping=0; expected a number > 0"),
    (torchq.ptq.adaround_, {"steps": 0}, "got steps=0; expected at least 1"),
    (torchq.ptq.smooth_, {"alpha": 2}, "got alpha=2; expected 0 to 1, or 'auto'"),
    (torchq.ptq.correct_bias_, {"method": "magic"}, "got method='magic'; expected 'empirical' or"),
    (torchq.ptq.equalize_, {"iterations": 0}, "got iterations=0; expected at least 1"),
]


@pytest.mark.parametrize(("function", "arguments", "text"), ARGUMENTS)
def test_other_arguments_are_named(function: Any, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=f"{function.__name__}: {text}"):
        function(calibrated(), [X], **arguments)
