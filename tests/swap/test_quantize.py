"""quantize_ and restore_: in place, all or none, once, and back; each place has its own range."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.nn import QuantSiLU
from torchq.runtime import planned_target


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2))


X = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)


def test_restore_gives_everything_back() -> None:
    model = net()
    objects = {n: id(v) for n, v in (*model.named_parameters(), *model.named_modules())}
    classes = [type(m) for m in model.modules()]
    expected = model(X)
    keys = list(model.state_dict())
    for _ in range(2):
        torchq.quantize_(model)
        torchq.calibrate(model, [X], progress=False)
        assert not torch.equal(model(X), expected)
        assert torchq.restore_(model)
        assert [type(m) for m in model.modules()] == classes and list(
            model.state_dict()
        ) == keys
        assert {
            n: id(v) for n, v in (*model.named_parameters(), *model.named_modules())
        } == objects
        assert torch.equal(model(X), expected)
    assert torchq.restore_(model) == ()


def test_a_second_time_quantizes_what_is_left() -> None:
    model = net()
    torchq.quantize_(model, include="0")
    first = model[0].input_quantizer
    report = torchq.quantize_(model)
    assert [d.name for d in report.replaced] == ["3"]
    assert {d.name: d.reason for d in report.skipped} == {"0": "quantized already"}
    assert model[0].input_quantizer is first
    text = r"nothing to quantize \(0: quantized already; 3: quantized already\)"
    with pytest.raises(ConfigError, match=text):
        torchq.quantize_(model)


def test_an_interrupted_restore_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torchq.quantize_(model)
    done: list[nn.Module] = []

    def interrupted(module: nn.Module) -> nn.Module:
        if done:
            raise KeyboardInterrupt
        done.append(module)
        return torchq.nn.revert_(module)

    monkeypatch.setattr("torchq.swap.apply.revert_", interrupted)
    with pytest.raises(KeyboardInterrupt):
        torchq.restore_(model)
    assert [type(layer) for layer in model] == [torchq.nn.QuantLinear] * 2
    assert done == [model[0]] and "0.weight_quantizer.amax" in model.state_dict()


IMAGE = torch.linspace(-2, 2, 48).reshape(1, 3, 4, 4)


class Block(nn.Module):
    default_act = nn.SiLU()  # one object of the class, as in Ultralytics' Conv

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1)
        self.act = Block.default_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv(x))


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Block(3), nn.Sequential(Block(3), nn.Flatten(), nn.Linear(48, 2))
    ).eval()


def test_each_place_gets_a_range_and_the_shared_object_stays_float() -> None:
    model, other = blocks(), blocks()
    report = torchq.quantize_(model, target="onnxruntime")
    assert [d.name for d in report.replaced if d.class_name == "SiLU"] == [
        "0.act",
        "1.0.act",
    ]
    first = model[0].act
    second = model[1][0].act
    assert isinstance(first, QuantSiLU) and isinstance(second, QuantSiLU)
    assert first is not second
    torchq.calibrate(model, [IMAGE], progress=False)
    assert first.input_quantizer.amax != second.input_quantizer.amax
    assert type(Block.default_act) is nn.SiLU and other[0].act is Block.default_act
    assert [name for name, _ in first.named_children()] == [
        "input_quantizer",
        "gate_quantizer",
    ]
    assert not list(Block.default_act.children())
    with torchq.disabled(model, "*"):
        assert torch.equal(model(IMAGE), other(IMAGE))


def test_a_shared_parent_is_one_place() -> None:
    block = Block(3)
    block.act = nn.SiLU()
    model = nn.Sequential(block, block)
    torchq.quantize_(model, target="onnxruntime")
    assert model[0] is model[1] is block
    assert isinstance(block.act, QuantSiLU)


# --- what it costs --------------------------------------------------------------------------------


CALLS: list[torch.Size] = []


class Counted(nn.Module):
    """Counts its calls with numbers; a trace calls it with symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = (
            nn.Conv2d(3, 8, 1),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor):
            CALLS.append(x.shape)
        h = self.norm(self.a(x))
        y: Tensor = self.b(h) + h
        return y


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_a_conversion_runs_the_model_four_times_at_most(target: str | None) -> None:
    CALLS.clear()
    x = torch.rand(2, 3, 4, 4)
    torchq.quantize_(Counted().eval(), target=target, example=x, progress=False)
    # The calls, the facts for the plan, before and afterwards.
    assert len(CALLS) == 4


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_planning_runs_the_model_twice_as_it_is_and_converted(
    target: str | None,
) -> None:
    x = torch.rand(2, 3, 4, 4)
    CALLS.clear()
    torchq.plan(Counted().eval(), target=target, example=x)
    assert len(CALLS) == 2
    CALLS.clear()
    unchecked = {"check": False, "progress": False}
    torchq.quantize_(Counted().eval(), target=target, example=x, **unchecked)
    assert len(CALLS) == 2
    CALLS.clear()
    torchq.quantize_(Counted().eval(), target=target, progress=False)
    assert CALLS == []


def test_calibration_runs_the_model_once_and_twice_more_on_a_third() -> None:
    model = Counted().eval()
    batches = [torch.rand(2, 3, 4, 4) for _ in range(6)]
    torchq.quantize_(model, progress=False)
    CALLS.clear()
    torchq.calibrate(model, batches, progress=False)
    # The ranges; what is corrected; what the correction does to the output.
    assert len(CALLS) == 6 + 2 + 2
    CALLS.clear()
    torchq.calibrate(model, batches, correct=False, force=True, progress=False)
    assert len(CALLS) == 6


class Scaled(nn.Module):
    """Has a matrix, and multiplies none by it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[0]


def test_a_module_that_multiplied_no_weight_needs_no_row() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    assert [d.name for d in torchq.plan(model).skipped] == ["1"]
    assert torchq.plan(model, example=torch.randn(2, 4)).skipped == ()


@pytest.mark.parametrize("check", [True, False])
def test_the_model_remembers_its_target(check: bool) -> None:
    model = net()
    example = torch.randn(1, 3, 4, 4)
    torchq.quantize_(
        model, target="onnxruntime", example=example, check=check, progress=False
    )
    assert planned_target(model) == "onnxruntime"
    torchq.restore_(model)
    assert planned_target(model) is None


def test_the_model_remembers_its_target_without_an_example() -> None:
    model = net()
    torchq.quantize_(model, target="tensorrt")
    assert planned_target(model) == "tensorrt"
