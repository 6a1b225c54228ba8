"""The analysis of models in wrappers of torch, and of compiled ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import simulated
from tests.rank_processes import needs_gloo
from tests.wrappers import WRAPPERS, one_process

__all__ = ["one_process"]

MEASURES: dict[str, Callable[..., Any]] = {
    "sensitivity": torchq.sensitivity,
    "fisher": lambda *args, **options: torchq.sensitivity(*args, "fisher", **options),
    "layer_errors": torchq.layer_errors,
    "doctor": torchq.doctor,
    "report": partial(torchq.report, plan=False),
    "compare": lambda model, *args, **options: torchq.analysis.compare(
        model, model, *args, **options
    ),
    "mixed_precision": partial(torchq.mixed_precision, budget={"mean_bits": 6}),
}

BATCH = torch.arange(32.0).reshape(8, 4).sin()


def quantized() -> nn.Sequential:
    torch.manual_seed(0)
    return simulated(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(), [BATCH]
    )


@pytest.mark.sample(12)
@needs_gloo
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapped_model_is_measured_as_the_model_inside(
    measure: str, wrapper: str
) -> None:
    function = partial(MEASURES[measure], progress=False)
    expected = function(quantized(), [BATCH])
    assert str(function(WRAPPERS[wrapper](quantized()), [BATCH])) == str(expected)


@pytest.mark.sample(3)
@pytest.mark.filterwarnings(
    "ignore:Using `torch.compile.module.` when there are global hooks"
)
@pytest.mark.parametrize("measure", MEASURES)
def test_compiled_parts_run_as_they_are_written(measure: str) -> None:
    model = quantized()
    model[0] = WRAPPERS["compile"](model[0])
    MEASURES[measure](model, [BATCH], progress=False)
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="the model was compiled"
    ):
        model(BATCH)


def test_a_forward_that_calls_the_compiled_model_is_measured_uncompiled() -> None:
    model = quantized()
    compiled = WRAPPERS["compile"](model)
    actual = torchq.layer_errors(
        model, [BATCH], forward=lambda _, batch: compiled(batch), progress=False
    )
    assert str(actual) == str(torchq.layer_errors(model, [BATCH], progress=False))
