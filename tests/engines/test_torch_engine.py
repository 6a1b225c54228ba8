"""The engine "torch": a model that would be slower on integers stays float, and says so."""

from __future__ import annotations

import pytest
import torch

import torchq
from tests.contracts.engine_contract import calibrated_detector, images
from torchq.engines import TorchEngine, torch_engine
from torchq.lowering import Int8Layer


def timed(monkeypatch: pytest.MonkeyPatch, *, integers: float, floats: float) -> None:
    """Let models take these seconds."""

    def seconds(model: torch.nn.Module, example: object) -> float:
        lowered = any(isinstance(module, Int8Layer) for module in model.modules())
        return integers if lowered else floats

    monkeypatch.setattr(torch_engine, "_seconds", seconds)


def has_integers(model: torch.nn.Module) -> bool:
    return any(isinstance(module, Int8Layer) for module in model.modules())


def test_a_slower_model_stays_float(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, integers=0.02, floats=0.01)
    model, x = calibrated_detector(), images(1)
    text = "Detector stays float: 20 ms on integers, 10 ms in float"
    with pytest.warns(UserWarning, match=text) as warned:
        deployed = torchq.deploy(model, x)
    assert warned[0].filename == __file__
    with torchq.disabled(model):
        assert torch.equal(deployed(x).scores, model(x).scores)
    assert deployed.engine == "torch" and not has_integers(deployed)
    row = torchq.summary(deployed).layers[0]
    assert row.name == "(root)" and row.kernel == "float"
    assert row.bytes == sum(4 * p.numel() for p in model.parameters())
    assert row.note == "stays float: 20 ms on integers, 10 ms in float"


@pytest.mark.parametrize(
    ("integers", "floats"),
    [(0.01, 0.02), (0.0102, 0.01), (0.004, 0.001)],
    ids=["faster", "within the noise", "too short to measure"],
)
def test_other_models_run_on_integers(
    integers: float, floats: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, integers=integers, floats=floats)
    assert has_integers(torchq.deploy(calibrated_detector(), images(1)))


def test_integers_can_be_insisted_on(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, integers=0.02, floats=0.01)
    model = calibrated_detector()
    for options in ({"engine": TorchEngine(measured=False)}, {"fuse": False}):
        assert has_integers(torchq.deploy(model, images(1), **options))
    assert has_integers(torchq.deploy(model))  # no example to measure
