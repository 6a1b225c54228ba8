"""What ``deploy`` compares, on which inputs and how closely, and what it refuses by name."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.models import simulated
from torchq.errors import ExportError
from torchq.lowering.check import ReferenceCheck
from torchq.lowering.placeholder import PLACEHOLDER
from torchq.lowering.state import carried_state, sets_attributes
from torchq.runtimes.engine import Task
from torchq.runtimes.export import _without_warnings_of_tracing
from torchq.runtimes.other_inputs import other_inputs

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

#: Products of weights of 8 bits overflow on CPUs without VNNI.
SEVEN_BITS = torchq.recipes.int8(reduce_range=True)


def image(sign: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return sign * torch.rand(2, 3, 8, 8, generator=generator)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 4, 3, padding=1)
        self.b = nn.Conv2d(4, 4, 3, padding=1)


class Branch(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h) if x.mean() > 0 else self.b(-h)


class Loop(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        for _ in range(1 + int(x.mean() > 0)):
            h = self.b(h)
        return h


class Cut(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))[..., : int((x[0, 0, 0] > 0).sum()) + 1]


class Exit(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if bool(h.abs().amax() < 0.3 * x.abs().amax() + x.mean()):
            return h
        return self.b(h)


def calibrated(net: nn.Module, *batches: Tensor, target: str | None = None) -> Any:
    torch.manual_seed(0)
    config = None if target else SEVEN_BITS
    example = batches[0] if target else None
    return simulated(
        net.eval(),
        [*batches],
        config,
        target=target,
        example=example,
    )


@torch.no_grad()
@pytest.mark.sample(1)
@pytest.mark.parametrize("net", [Branch, Loop, Exit])
def test_a_forward_that_depends_on_data_is_left_to_torch(
    net: Callable[[], nn.Module],
) -> None:
    """The older exporter held the way of the example: -1.5 dB on another input."""
    model = calibrated(net(), image(), image(-1.0))
    message = r"deploy: target 'onnxruntime quantized': .*for all inputs"
    with pytest.raises(ExportError, match=message):
        torchq.deploy(model, image(), target="onnxruntime", progress=False)
    deployed = torchq.deploy(model, image(), target="torch", progress=False)
    for x in (image(), image(-1.0), 0.1 * image()):
        assert sqnr(deployed(x), model(x)) > 60


@torch.no_grad()
def test_a_length_that_depends_on_data_is_left_to_torch_or_right() -> None:
    """Whether torch can export it depends on its version."""
    model = calibrated(Cut(), image(), image(-1.0))
    deployed = []
    for engine in ("torch", "onnxruntime"):
        with suppress(ExportError):
            deployed.append(
                torchq.deploy(model, image(), target=engine, progress=False)
            )
    assert deployed
    for module in deployed:
        for x in (image(), image(-1.0), 0.1 * image()):
            # One code of the first layer may be off by one; the wrong length raises an error.
            assert sqnr(module(x), model(x)) > 50


class Repeated(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x)).flatten(2)
        places = torch.arange(h.shape[2]) % 5
        return torch.zeros(*h.shape[:2], 5).index_add_(2, places, h)


@torch.no_grad()
def test_indices_that_repeat_are_added() -> None:
    """In the file of the older exporter the last one counts."""
    model = calibrated(Repeated(), image())
    deployed = torchq.deploy(model, image(), target="onnxruntime", progress=False)
    assert sqnr(deployed(image(-1.0)), model(image(-1.0))) > 60


def test_what_tracing_warns_of_is_an_error() -> None:
    message = "TorchScript warns: a way; expected a graph that holds"
    with pytest.raises(ExportError, match=message), _without_warnings_of_tracing():
        warnings.warn("a way", torch.jit.TracerWarning, stacklevel=1)
    with _without_warnings_of_tracing():
        warnings.warn("no way", DeprecationWarning, stacklevel=1)


class Changed(nn.Module):
    """A deployed model that is damaged."""

    def __init__(
        self, model: nn.Module, change: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.model = model
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.model(x), x)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "shows_on"),
    [
        (lambda y, x: y * 1.01, (0, 1)),
        (lambda y, x: torch.where(x.mean() > 0, y, y * 1.01), (1,)),
        (lambda y, x: y.roll(1, 1), (0, 1)),
        (lambda y, x: y.relu(), (0, 1)),
        (lambda y, x: y + 0.02 * y.abs().mean(), (0, 1)),
        (lambda y, x: y, ()),
    ],
    ids=["gain", "gain on other values", "swapped", "lost sign", "shift", "nothing"],
)
def test_damage_shows_on_the_example_or_on_other_values(
    change: Any, shows_on: Any
) -> None:
    """All of these passed a bound of 20 dB, or of what quantization itself makes."""
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)), image()
    )
    task = Task(model, image())
    deployed = torchq.deploy(model, image(), target="torch", progress=False)
    wrong = Changed(deployed, change)
    assert len(task.checks) == 2
    actual = tuple(
        number for number, check in enumerate(task.checks) if check(wrong)[0]
    )
    assert actual == shows_on
    loose = tuple(
        number for number, check in enumerate(task.checks) if check.difference(wrong)
    )
    assert set(shows_on) <= set(loose)


def test_a_lost_result_of_a_layer_is_named() -> None:
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)),
        image(),
    )
    deployed = torchq.deploy(
        model,
        image(),
        target=torchq.runtimes.Torch(fuse=False),
    )
    deployed[0].register_forward_hook(lambda module, args, out: out * 1.02)
    problem, _ = ReferenceCheck(model, image())(deployed)
    assert (
        problem
        == "given the inputs of the simulation, the input of 1 differs, for the example"
    )


def test_other_inputs_have_other_values_and_indices_that_occur() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            return x

    x = image()
    ids = torch.tensor([[0, 3, 9]])
    for number, (floats, places) in enumerate(other_inputs(Net(), (x, ids))):
        assert floats.shape == x.shape
        assert not torch.equal(floats, x)
        assert set(places.flatten().tolist()) == {0, 3, 9}
        assert (floats.mean() < 0) == (number < 2)
    named = next(iter(other_inputs(Net(), {"x": x, "ids": ids})))
    assert named.keys() == {"x", "ids"}


class Choosy(Two):
    def forward(self, x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return self.b(self.a(x).sqrt().nan_to_num())


def test_values_that_a_model_refuses_are_not_compared() -> None:
    model = calibrated(Choosy(), image())
    assert [check.what for check in Task(model, image()).checks] == [
        "the example",
        "an input of other values",
    ]


@torch.no_grad()
def test_batches_of_the_user_take_the_place_of_made_up_values() -> None:
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3)),
        image(),
    )
    seen: list[float] = []
    model[0].register_forward_pre_hook(
        lambda module, args: seen.append(float(args[0].mean()))
    )
    deployed = torchq.deploy(
        model, image(), target="torch", batches=[2 * image(), 3 * image()]
    )
    assert min(seen) > 0
    assert "the example: result 0 " in deployed.checked
    assert "; batch 0: result 0 " in deployed.checked
    assert "; batch 1: " in deployed.checked


@torch.no_grad()
@pytest.mark.parametrize("target", ["torch", "onnxruntime"])
def test_without_a_check_the_result_says_so(target: str) -> None:
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3)),
        image(),
    )
    counted: list[int] = []
    model[0].register_forward_pre_hook(lambda module, args: counted.append(1))
    deployed = torchq.deploy(model, image(), target=target, check=False, progress=False)
    assert deployed.checked == "not compared with the simulation: check=False"
    assert "check=False" in str(torchq.summary(deployed))


class Buffer(nn.Module):
    past: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv1d(4, 8, 3)
        self.o = nn.Conv1d(8, 2, 1)
        self.register_buffer("past", torch.zeros(1, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.past, x], 2)
        self.past = x[:, :, -2:].detach()
        return self.o(F.relu(self.c(x)))


class InPlaceBuffer(Buffer):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.past.clone(), x], 2)
        self.past.copy_(x[:, :, -2:])
        return self.o(F.relu(self.c(x)))


class Attribute(Buffer):
    """A list that grows; every third call starts anew."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if len(self.kept) == 3:
            self.kept = []
        y = self.o(F.relu(self.c(x + sum(k.mean() for k in self.kept))))
        self.kept.append(x)
        return y


class Noting(Buffer):
    """Notes its last result, which no call reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.o(F.relu(self.c(x)))
        return self.last


def sound(scale: float = 1.0) -> Tensor:
    return scale * torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("net", "name"), [(Buffer, "past"), (InPlaceBuffer, "past"), (Attribute, "kept")]
)
def test_a_state_is_refused_by_name_or_kept_in_parts(net: Any, name: str) -> None:
    model = calibrated(net(), sound())
    with pytest.raises(
        ExportError, match=f"quantized': {name}: changes in a call and changes the"
    ):
        torchq.deploy(model, sound(), target="onnxruntime", progress=False)
    with torch.no_grad():
        for example in (sound(), None):
            if example is None and net is InPlaceBuffer:
                continue  # A trace holds what is written in place.
            deployed = torchq.deploy(model, example, target="torch", progress=False)
            other = copy.deepcopy(model)
            for number in range(5):
                x = sound(1.0 + number)
                assert sqnr(deployed(x), other(x)) > 60


def test_what_a_call_only_notes_is_no_state() -> None:
    model = calibrated(Noting(), sound())
    assert carried_state(model, sound())[1] == ()
    assert sets_attributes(model)
    assert not sets_attributes(nn.Linear(2, 2))
    assert torchq.deploy(model, sound(), target="onnxruntime").target == "onnxruntime"


@torch.no_grad()
@pytest.mark.parametrize("target", ["torch", "onnxruntime"])
def test_a_deployed_model_has_a_parameter_that_tells_type_and_device(
    target: str,
) -> None:
    """Others ask ``next(model.parameters()).dtype`` before they make an input."""
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3)),
        image(),
    )
    deployed = torchq.deploy(model, image(), target=target, progress=False)
    (parameter,) = deployed.parameters()
    assert (parameter.dtype, parameter.device) == (torch.float32, image().device)
    assert parameter.numel() == 0
    assert not parameter.requires_grad
    assert not any(PLACEHOLDER in key for key in deployed.state_dict())
    deployed.load_state_dict(deployed.state_dict())
    torch.optim.SGD(deployed.parameters(), 0.1).step()
    buffer = io.BytesIO()
    torch.save(deployed, buffer)
    buffer.seek(0)
    for copied in (
        copy.deepcopy(deployed),
        pickle.loads(pickle.dumps(deployed)),
        torch.load(buffer, weights_only=False),
    ):
        assert len(list(copied.parameters())) == 1
        assert torch.equal(copied(image()), deployed(image()))
        assert copied.state_dict().keys() == deployed.state_dict().keys()


class Tied(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Embedding(50, 16)
        self.h = nn.Linear(16, 50, bias=False)
        self.h.weight = self.e.weight

    def forward(self, i: Tensor) -> Tensor:
        return self.h(torch.tanh(self.e(i)))


@torch.no_grad()
def test_a_tied_weight_is_rounded_for_one_reader_alone() -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (64, 7))
    model = simulated(
        Tied().eval(),
        [ids],
        torchq.recipes.integer(4, 16),
    )
    deployed = torchq.deploy(model, ids, target="torch", progress=False)
    assert sqnr(deployed(ids), model(ids)) > 100


@torch.no_grad()
def test_a_model_with_a_scripted_part_is_deployed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        part = torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), part),
        image(),
    )
    deployed = torchq.deploy(model, image(), target="torch", progress=False)
    assert sqnr(deployed(image()), model(image())) > 60


def test_a_deployment_runs_the_simulation_four_times_at_most() -> None:
    calls: list[Any] = []

    class Counted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(x)
            return super().forward(x)

    model = calibrated(
        Counted(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)),
        image(),
    )
    calls.clear()
    torchq.deploy(model, image(), target="torch", progress=False)
    # The example and an input of other values, each once for results and once for layers; one that
    # is no tensor is a trace.
    assert sum(isinstance(x, Tensor) and x.device.type == "cpu" for x in calls) == 4
