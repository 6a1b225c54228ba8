"""What all functions of the analysis answer to arguments that cannot be right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import simulated
from torchq.errors import CalibrationError, ConfigError

MEASURES: dict[str, Callable[..., Any]] = {
    "layer_errors": torchq.layer_errors,
    "sensitivity": torchq.sensitivity,
    "fisher": lambda *args, **options: torchq.sensitivity(*args, "fisher", **options),
    "doctor": torchq.doctor,
    "report": torchq.report,
}
measures = pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)


def quantized() -> nn.Module:
    torch.manual_seed(0)
    return simulated(
        nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval(),
        [torch.randn(8, 4)],
    )


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
WRONG: dict[str, tuple[Any, dict[str, int], type[Exception], str]] = {
    "no batch": ([], {}, CalibrationError, "got no batch; expected at least one"),
    "one batch": (X, {}, ConfigError, r"got a Tensor as batches; .* Pass \[batch\]"),
    "none of them": (
        [X],
        {"num_batches": 0},
        ConfigError,
        "=0; expected an integer of at least",
    ),
    "fewer": (
        [X],
        {"num_batches": -1},
        ConfigError,
        "num_batches=-1; expected an integer of at",
    ),
}


@measures
@pytest.mark.parametrize("kind", WRONG)
def test_batches_that_cannot_be_right(measure: Callable[..., Any], kind: str) -> None:
    batches, options, error, message = WRONG[kind]
    with pytest.raises(error, match=message):
        measure(quantized(), batches, progress=False, **options)


@measures
def test_a_float_model(measure: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"has no quantizer.* expected a quantized model"
    ):
        measure(
            nn.Sequential(nn.Linear(4, 3)),
            [X],
            progress=False,
        )


@measures
def test_batches_that_can_be_read_only_once(measure: Callable[..., Any]) -> None:
    batches = [X + n for n in range(3)]
    model = quantized()
    once = measure(model, iter(batches), progress=False)
    often = measure(model, batches)
    assert str(once) == str(often)


BUDGET: dict[str, Any] = {"budget": {"mean_bits": 5}}
OTHERS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (torchq.mixed_precision, ([],), BUDGET, "mixed_precision: got no batch"),
    (
        torchq.mixed_precision,
        ([X],),
        BUDGET | {"formats": []},
        "mixed_precision: got no formats",
    ),
    (torchq.mixed_precision, ([X],), BUDGET | {"formats": ["float"]}, "got no formats"),
    (torchq.report, ([X], "a.pdf"), {}, r"got suffix '\.pdf'"),
    (
        torchq.report,
        ([X], None, "sqnr"),
        {},
        "report: got metric 'sqnr'; expected a function",
    ),
    (
        torchq.sensitivity,
        ([X], "acc"),
        {},
        r"sensitivity: got metric 'acc'; expected .*'fisher'",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "options", "text"), OTHERS)
def test_formats_and_metrics_that_do_not_exist(
    function: Any, arguments: tuple[Any, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises((CalibrationError, ConfigError), match=text):
        function(quantized(), *arguments, progress=False, **options)


def test_a_folder_that_does_not_exist_is_found_before_the_work(tmp_path: Path) -> None:
    def never(model: nn.Module, batch: Any) -> Any:
        raise AssertionError("the model ran")

    with pytest.raises(
        ConfigError, match=r"the folder .*nowhere does not exist\. Create it"
    ):
        torchq.report(
            quantized(),
            [1],
            tmp_path / "nowhere" / "r.json",
            forward=never,
        )
