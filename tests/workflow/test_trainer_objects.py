"""Objects that hold a network and train it, as Ultralytics' YOLO, stand for their network."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet
from torchq.graph import Graph

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Trains(nn.Module):
    """Starts a training where others set the mode."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ConvNet().eval() if model is None else model

    def train(self, trainer: Any = None, **settings: Any) -> Any:
        raise AssertionError("a training was started")


class SwitchesItself(nn.Module):
    """Sets the mode by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def train(self, flag: bool = True) -> "SwitchesItself":
        return super().train(flag)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


@pytest.mark.slow
def test_the_network_goes_to_a_file(tmp_path: Path) -> None:
    holder = Trains()
    assert torchq.fuse_(holder, X, progress=False).applied
    planned = torchq.plan(holder, target="onnxruntime", example=X)
    quantized = torchq.quantize_(
        holder, target="onnxruntime", example=X, progress=False
    )
    assert quantized.decisions == planned.decisions
    torchq.calibrate(holder, [X], progress=False)
    assert torchq.summary(holder).rows == torchq.summary(holder.model).rows
    torchq.save(holder, tmp_path / "net.pt")
    path = tmp_path / "net.onnx"
    torchq.export_onnx(holder, X, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(holder, path, [X], progress=False).ok
    assert torchq.doctor(holder, [X], progress=False).ok
    restored = torchq.restore_(holder)
    assert "head" in restored
    assert not hasattr(holder.model, "quant_add")


def test_modules_with_a_switch_of_their_own_are_quantized_whole() -> None:
    model = SwitchesItself()
    plan = torchq.quantize_(model, progress=False)
    assert [decision.name for decision in plan.replaced] == ["model", "head"]


class PassesOn(nn.Module):
    """A network whose ``train`` takes any arguments, a mode among them, and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)


def test_a_network_that_takes_any_arguments_for_its_mode_is_no_trainer() -> None:
    assert [d.name for d in torchq.plan(PassesOn()).replaced] == ["model", "head"]


ROWS = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
BATCHES = [ROWS]
RECIPE = torchq.recipes.int8()


def plain() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers).eval()


def swapped() -> nn.Module:
    model = plain()
    torchq.quantize_(model, RECIPE, progress=False)
    return model


def calibrated() -> nn.Module:
    model = swapped()
    torchq.calibrate(model, BATCHES, progress=False)
    return model


def first_value(model: nn.Module) -> float:
    with torch.no_grad():
        return float(model(ROWS)[0, 0])


def saved(model: nn.Module, folder: Path) -> Path:
    torchq.save(model, folder / "small.pt")
    return folder / "small.pt"


def exported(model: nn.Module, folder: Path) -> Path:
    path = folder / "small.onnx"
    torchq.export_onnx(model, ROWS, path, dynamo=False, progress=False)
    return path


def entered(context: Any) -> Any:
    with context as value:
        return value


def distilled(model: nn.Module) -> Any:
    with torchq.qat.Distillation(model) as distillation:
        distillation.model(ROWS)
        return distillation.loss()


def settings(model: nn.Module) -> Any:
    tuned = torchq.ptq.TunedConfig(RECIPE, before=("equalize_",), algorithm="gptq_")
    return tuned.apply_(model, BATCHES)


QUIET: dict[str, Any] = {"progress": False}
QUANTIZERS = ["0.input_quantizer", "3.input_quantizer"]
Made = Callable[[], nn.Module]

#: Function -> the model that it is for, and a call of it with that model and a folder.
CALLS: dict[str, tuple[Made, Callable[[Any, Path], Any]]] = {
    "adopt_": (plain, lambda m, _: torchq.adopt_(m, plain())),
    "calibrate": (swapped, lambda m, _: torchq.calibrate(m, BATCHES, **QUIET)),
    "deploy": (calibrated, lambda m, _: torchq.deploy(m, ROWS, **QUIET)),
    "disabled": (swapped, lambda m, _: entered(torchq.disabled(m, "0"))),
    "doctor": (calibrated, lambda m, _: torchq.doctor(m, BATCHES, **QUIET)),
    "expected_codes": (
        calibrated,
        lambda m, folder: torchq.expected_codes(m, BATCHES, folder / "codes.npz"),
    ),
    "export_onnx": (calibrated, exported),
    "forecast": (
        plain,
        lambda m, _: torchq.forecast(m, ROWS, "torch", **QUIET)["torch"].share,
    ),
    "fuse_": (plain, lambda m, _: torchq.fuse_(m, ROWS, **QUIET)),
    "layer_errors": (calibrated, lambda m, _: torchq.layer_errors(m, BATCHES, **QUIET)),
    "load": (plain, lambda m, folder: torchq.load(m, saved(calibrated(), folder))),
    "mixed_precision": (
        plain,
        lambda m, _: torchq.mixed_precision(
            m, BATCHES, budget={"mean_bits": 6}, **QUIET
        ).summary(),
    ),
    "plan": (plain, lambda m, _: torchq.plan(m, RECIPE, example=ROWS)),
    "quantize_": (
        plain,
        lambda m, _: torchq.quantize_(m, RECIPE, example=ROWS, **QUIET),
    ),
    "report": (
        calibrated,
        lambda m, _: torchq.report(m, BATCHES, plan=False, **QUIET).data["verdict"],
    ),
    "restore_": (calibrated, lambda m, _: torchq.restore_(m, ROWS)),
    "save": (calibrated, saved),
    "sensitivity": (calibrated, lambda m, _: torchq.sensitivity(m, BATCHES, **QUIET)),
    "summary": (calibrated, lambda m, _: torchq.summary(m)),
    "tune": (
        plain,
        lambda m, _: torchq.tune(m, BATCHES, first_value, max_drop=9.0, **QUIET).code,
    ),
    "verify_dump": (
        calibrated,
        lambda m, _: torchq.verify_dump(m, {"0.input_quantizer": ROWS.numpy()}, ROWS),
    ),
    "verify_onnx": (
        calibrated,
        lambda m, folder: (
            torchq.verify_onnx(m, exported(m, folder), BATCHES, **QUIET).ok
        ),
    ),
    "analysis.compare": (
        calibrated,
        lambda m, _: torchq.analysis.compare(m, m, BATCHES, **QUIET).reports[1][
            "verdict"
        ],
    ),
    "analysis.compare_outputs": (
        calibrated,
        lambda m, _: torchq.analysis.compare_outputs(m, BATCHES, **QUIET),
    ),
    "analysis.Detections.against": (
        plain,
        lambda m, _: torchq.analysis.Detections().against(m, BATCHES),
    ),
    "graph.Graph": (plain, lambda m, _: str(Graph(m, ROWS).module.graph)),
    "graph.call_model": (plain, lambda m, _: torchq.graph.call_model(m, ROWS)),
    "graph.record": (plain, lambda m, _: len(torchq.graph.record(m, ROWS).calls)),
    "graph.trace": (
        plain,
        lambda m, _: str(torchq.graph.trace(m, ROWS).graph_module.graph),
    ),
    "swap.apply_": (
        plain,
        lambda m, _: torchq.swap.apply_(m, torchq.plan(plain(), RECIPE)),
    ),
    "swap.plan_of": (calibrated, lambda m, _: torchq.swap.plan_of(m).table()),
    "runtimes.speed": (
        calibrated,
        lambda m, _: torchq.runtimes.speed(m, ROWS, time=lambda path: 1.0),
    ),
    "nn.shared_groups": (calibrated, lambda m, _: torchq.nn.shared_groups(m)),
    "nn.share_quantizers_": (
        swapped,
        lambda m, _: torchq.nn.share_quantizers_(m, QUANTIZERS).name,
    ),
    "onnx.apply_calibration_cache": (
        lambda: torch.fx.symbolic_trace(swapped()),
        lambda m, _: torchq.onnx.apply_calibration_cache(m, {"other": 1.0}, ROWS),
    ),
    "onnx.apply_encodings": (
        lambda: torch.fx.symbolic_trace(swapped()),
        lambda m, _: torchq.onnx.apply_encodings(m, {}, ROWS),
    ),
    "onnx.export_encodings": (
        calibrated,
        lambda m, folder: torchq.onnx.export_encodings(m, ROWS, folder / "m.onnx"),
    ),
    "ptq.TunedConfig.apply_": (plain, lambda m, _: settings(m)),
    "ptq.adaround_": (
        calibrated,
        lambda m, _: torchq.ptq.adaround_(m, BATCHES, steps=2, **QUIET),
    ),
    "ptq.correct_bias_": (
        calibrated,
        lambda m, _: torchq.ptq.correct_bias_(m, BATCHES, **QUIET),
    ),
    "ptq.equalize_": (swapped, lambda m, _: torchq.ptq.equalize_(m, ROWS)),
    "ptq.equalize_depthwise_": (
        swapped,
        lambda m, _: torchq.ptq.equalize_depthwise_(m, BATCHES, **QUIET),
    ),
    "ptq.gptq_": (calibrated, lambda m, _: torchq.ptq.gptq_(m, BATCHES, **QUIET)),
    "ptq.smooth_": (swapped, lambda m, _: torchq.ptq.smooth_(m, BATCHES, **QUIET)),
    "qat.Distillation": (calibrated, lambda m, _: distilled(m)),
    "qat.float_twin": (calibrated, lambda m, _: torchq.qat.float_twin(m)(ROWS)),
    "qat.freeze_bn_": (plain, lambda m, _: torchq.qat.freeze_bn_(m)),
    "qat.unfreeze_bn_": (plain, lambda m, _: torchq.qat.unfreeze_bn_(m)),
    "qat.freeze_bn_from_": (plain, lambda m, _: torchq.qat.freeze_bn_from_(m, 2, 1)),
    "qat.freeze_ranges_from_": (
        calibrated,
        lambda m, _: torchq.qat.freeze_ranges_from_(m, 2, 1),
    ),
    "qat.learn_ranges_": (calibrated, lambda m, _: torchq.qat.learn_ranges_(m)),
    "qat.observing": (calibrated, lambda m, _: entered(torchq.qat.observing(m))),
    "qat.param_groups": (
        calibrated,
        lambda m, _: [len(g["params"]) for g in torchq.qat.param_groups(m, lr=0.1)],
    ),
    "qat.prepare": (
        plain,
        lambda m, _: torchq.qat.prepare(m, BATCHES, RECIPE, **QUIET).quantized,
    ),
    "qat.reestimate_bn_": (
        plain,
        lambda m, _: torchq.qat.reestimate_bn_(m, BATCHES, **QUIET),
    ),
    "qat.share_range_": (
        swapped,
        lambda m, _: torchq.qat.share_range_(m, "*.input_quantizer").name,
    ),
    "workflow.calibrate_weights": (
        swapped,
        lambda m, _: torchq.workflow.calibrate_weights(m),
    ),
    "workflow.embed_record_": (swapped, lambda m, _: torchq.workflow.embed_record_(m)),
    "workflow.freeze_": (calibrated, lambda m, _: torchq.workflow.freeze_(m)),
    "workflow.is_quantized": (swapped, lambda m, _: torchq.workflow.is_quantized(m)),
    "workflow.quantizers": (swapped, lambda m, _: list(torchq.workflow.quantizers(m))),
    "workflow.select_quantizers": (
        swapped,
        lambda m, _: list(torchq.workflow.select_quantizers(m, "0.weight_quantizer")),
    ),
    "workflow.weight_quantizers": (
        swapped,
        lambda m, _: len(torchq.workflow.weight_quantizers(m)),
    ),
}
#: Packages whose functions users call with models of their own.
PACKAGES = ("", "analysis", "onnx", "ptq", "qat", "runtimes", "swap", "workflow")


#: These time files, make two reports, or export by torch's newer exporter.
LONG = ["forecast", "analysis.compare", "onnx.export_encodings"]
ROWS_OF_TABLE = [
    pytest.param(name, marks=pytest.mark.slow) if name in LONG else name
    for name in CALLS
]


def functions_of_a_model() -> Iterator[str]:
    for package in PACKAGES:
        module = importlib.import_module(f"torchq.{package}".rstrip("."))
        for name in module.__all__:
            function = getattr(module, name)
            takes_one = isinstance(function, FunctionType) and next(
                iter(inspect.signature(function).parameters), ""
            ) in ("model", "a")
            if takes_one and (not package or not hasattr(torchq, name)):
                yield f"{package}.{name}".lstrip(".")


def test_every_function_of_a_model_has_a_row() -> None:
    assert not set(functions_of_a_model()) - set(CALLS)


def outcome(call: Callable[[Any, Path], Any], model: nn.Module, folder: Path) -> Any:
    """Return what a call returns, or the error by which it refuses, in words."""
    folder.mkdir()
    torch.manual_seed(0)
    try:
        value = call(model, folder)
    except torchq.errors.TorchqError as error:
        return f"{type(error).__name__}: {error}"
    if isinstance(value, (Path, nn.Module)):
        return type(value)
    return str(value).replace(str(folder), "")


@pytest.mark.parametrize("name", ROWS_OF_TABLE)
def test_what_is_done_to_a_trainer_is_done_to_its_network(
    name: str, tmp_path: Path
) -> None:
    make, call = CALLS[name]
    model = make()
    holder = Trains(make())
    expected = outcome(call, model, tmp_path / "network")
    got = outcome(call, holder, tmp_path / "trainer")
    assert got == expected or isinstance(expected, type)
    assert holder.model.training == model.training
    state = holder.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(state[key], value), key
