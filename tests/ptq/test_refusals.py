"""Batches, models and arguments that no algorithm can work with: a named error, nothing changed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.ptq.test_interrupts import same, state
from torchq.errors import CalibrationError, ConfigError, QuantizationError, TorchqError
from torchq.ptq import adaround_, correct_bias_, equalize_, gptq_, smooth_
from torchq.ptq.layers import grid_of

GOOD = torch.rand(16, 6, generator=torch.Generator().manual_seed(0))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def quantized(*, ready: bool = False, bits: int = 3) -> Any:
    model = net()
    torchq.quantize_(model, torchq.recipes.integer(bits, 8, weight_method="max"))
    if ready:
        torchq.calibrate(model, [GOOD], progress=False)
    return model


def normed() -> Any:
    model = nn.Sequential(nn.LayerNorm(6), *net())
    torchq.quantize_(model, torchq.recipes.integer(3, 8, weight_method="max"))
    return model


def ready() -> Any:
    return quantized(ready=True)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Check that a model is at the end as it was."""
    before = state(model)
    yield
    assert same(state(model), before, lambda name: True)


FUNCTIONS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], object]]] = {
    "smooth_": (normed, lambda m, b: smooth_(m, b, progress=False)),
    "correct_bias_": (ready, lambda m, b: correct_bias_(m, b, progress=False)),
    "gptq_": (ready, lambda m, b: gptq_(m, b, progress=False)),
    "adaround_": (ready, lambda m, b: adaround_(m, b, steps=2, progress=False)),
}
BATCHES: dict[str, tuple[Any, type[TorchqError], str]] = {
    "none": ([], CalibrationError, "got no batch"),
    "one tensor": (
        GOOD,
        ConfigError,
        "got a Tensor as batches; expected an iterable of batches",
    ),
    "no rows": ([GOOD[:0]], CalibrationError, "got batches without rows"),
    "NaN": ([GOOD * torch.nan], CalibrationError, "NaN or infinite"),
    "infinity": ([GOOD * torch.inf], CalibrationError, "NaN or infinite"),
    "too large to multiply": (
        [GOOD * 3e38],
        CalibrationError,
        "NaN or infinite|3.0e38",
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_bad_batches_are_named(name: str, kind: str) -> None:
    build, function = FUNCTIONS[name]
    batches, error, message = BATCHES[kind]
    model = build()
    # Products of finite inputs and weights overflow.
    if kind == "too large to multiply":
        with torch.no_grad():
            model[0].weight.mul_(1e39 if name == "smooth_" else 1e3)
    with unchanged(model), pytest.raises(error, match=message):
        function(model, batches)


class Branches(nn.Module):
    """A layer that stays float, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 4)
        self.float_layer = nn.Linear(8, 8)
        self.unused = nn.Linear(6, 6)
        self.before = nn.LayerNorm(6)
        self.behind = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.float_layer(torch.sigmoid(self.first(self.before(x))))
        return self.last(self.behind(torch.sigmoid(y)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_layers_that_are_float_or_do_not_run_are_left_alone(name: str) -> None:
    build, function = FUNCTIONS[name]
    model = Branches().eval()
    recipe = torchq.recipes.integer(3, 8, weight_method="max")
    torchq.quantize_(model, recipe, exclude=["float_layer"])
    if build is ready:
        torchq.calibrate(
            model, [GOOD], on_unseen="disable", correct=False, progress=False
        )
    before = model.state_dict()
    expected = Branches().state_dict()
    before = {key: value.clone() for key, value in before.items()}
    report: Any = function(model, [GOOD])
    assert list(report.skipped) == ["unused"]
    assert "reach" in report.skipped["unused"]
    after = model.state_dict()
    assert any(not torch.equal(after[key], before[key]) for key in before)
    for part in ("weight", "bias"):
        for layer in ("float_layer", "unused"):
            assert torch.equal(
                after[f"{layer}.{part}"],
                expected[f"{layer}.{part}"],
            ), layer


@pytest.mark.parametrize("name", FUNCTIONS)
def test_models_in_another_state_are_refused(name: str) -> None:
    """A float model, and one that is calibrated too early or not yet."""
    build, function = FUNCTIONS[name]
    with pytest.raises(ConfigError, match=f"{name}: got no "):
        function(net(), [GOOD])
    message = "0.input_quantizer has no range yet"
    message = "got a calibrated model" if build is normed else message
    model = quantized(ready=build is normed)
    with unchanged(model), pytest.raises(ConfigError, match=f"{name}: {message}"):
        function(model, [GOOD])


def gated() -> Any:
    """Return a network for ONNX Runtime whose SiLU has a gate from 0 to 1, not calibrated."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 1), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.ReLU())
    model = nn.Sequential(*layers, nn.Conv2d(4, 4, 1)).eval()
    images = torch.rand(2, 3, 4, 4)
    torchq.quantize_(model, target="onnxruntime", example=images, progress=False)
    return model, images


def test_a_range_that_calibration_does_not_choose_is_no_calibration() -> None:
    model, images = gated()
    assert model[1].gate_quantizer.calibrated
    pairs = equalize_(model, images).pairs
    assert [(pair.first, pair.second) for pair in pairs] == [("2", "4")]


def test_a_range_that_a_layer_was_given_is_one_that_would_be_wrong() -> None:
    model = net()
    given = torchq.Rule("2", input=torchq.QuantDescriptor(amax=3.0))
    config = torchq.recipes.int8().with_rules(given)
    torchq.quantize_(model, config, example=GOOD, progress=False)
    message = r"equalize_: got a calibrated model \(2.input_quantizer"
    with unchanged(model), pytest.raises(ConfigError, match=message):
        equalize_(model, GOOD)


def test_outputs_that_overflow_are_no_equalization() -> None:
    model = net()
    message = "equalize_: the float output changed by nan"
    with unchanged(model), pytest.raises(QuantizationError, match=message):
        equalize_(model, GOOD * torch.inf)


@pytest.mark.parametrize("function", [gptq_, adaround_])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_codes_stay_within_the_format(function: Any, size: float) -> None:
    """Weights far from 1, and the widest format, make no code that overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(size**0.25)
        model[0].weight[0, 0] *= 50.0  # an outlier, beyond the range that is searched
    torchq.quantize_(model, torchq.recipes.integer(16, 16))
    torchq.calibrate(model, [GOOD], progress=False)
    arguments: dict[str, Any] = {"steps": 2} if function is adaround_ else {}
    # With 16 bits the outputs may be worse by a rounding error, which would undo it.
    function(model, [GOOD], compare=False, progress=False, **arguments)
    for layer in model:
        codes = layer.weight.detach() / grid_of(layer).scale[0]  # type: ignore[operator]
        whole: Tensor = codes.round()
        torch.testing.assert_close(codes, whole, rtol=1e-5, atol=1e-3)
        assert int(whole.min()) >= -(2**15)
        assert int(whole.max()) <= 2**15 - 1
        assert bool(layer.weight.isfinite().all())
        assert bool(layer.bias.isfinite().all())


def test_nan_while_learning_is_named_and_the_block_is_as_before() -> None:
    model = quantized(ready=True)
    runs = 0

    def breaks(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        nonlocal runs
        runs += torch.is_grad_enabled()
        return out * torch.nan if runs > 2 else out

    handle = model[0].register_forward_hook(breaks)
    text = "adaround_: 0: the error became NaN or infinite"
    with unchanged(model), pytest.raises(CalibrationError, match=text):
        adaround_(model, [GOOD], steps=5, progress=False)
    handle.remove()


X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def with_batchnorm() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)
    model = nn.Sequential(*layers).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [X], progress=False)
    return model


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        (
            lambda: 1.0,
            r"tune: got metric <.*; expected a function .* or metric\(model\)",
        ),
        (
            lambda model, batches: 1.0,
            r"tune: got metric <.*; expected metric\(model\), or",
        ),
        (0.5, "tune: got metric 0.5; expected a function"),
        (lambda model: None, "the metric returned a NoneType; expected a number"),
        (lambda model: model(X), "the metric returned a Tensor; expected a number"),
    ],
)
def test_a_metric_of_another_form_is_named(metric: Any, text: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    with pytest.raises(ConfigError, match=text):
        torchq.tune(model, [X], metric, max_drop=0.1, progress=False)


ARGUMENTS: list[tuple[Any, dict[str, Any], str]] = [
    (
        torchq.ptq.gptq_,
        {"num_batches": 0},
        "got num_batches=0; expected an integer of at least 1",
    ),
    (torchq.ptq.adaround_, {"steps": 0}, "got steps=0; expected at least 1"),
    (torchq.ptq.smooth_, {"alpha": 2}, "got alpha=2; expected 0 to 1, or 'auto'"),
]


@pytest.mark.parametrize(("function", "arguments", "text"), ARGUMENTS)
def test_other_arguments_are_named(
    function: Any, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=f"{function.__name__}: {text}"):
        function(with_batchnorm(), [X], **arguments)
