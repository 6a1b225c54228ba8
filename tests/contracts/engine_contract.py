"""The promises of every engine of ``torchq.deploy``, as tests to inherit.

A subclass needs the fixtures ``engine``, an engine with its settings, ``simulated``, a calibrated
detector, and ``deployed``, the same on that engine. The promises are those of an ``nn.Module`` that
is called as the original one; what an engine computes is compared with the simulation.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from torchq.runtimes import Engine

__all__ = [
    "BOUND_DB",
    "Detection",
    "Detector",
    "EngineContract",
    "calibrated_detector",
    "images",
]

#: Deployed models may differ from the simulation by this many dB, as ``deploy`` itself allows.
BOUND_DB = 20.0


@dataclasses.dataclass
class Detection:
    """What the network returns: a dataclass with tensors at several depths."""

    scores: Tensor
    maps: dict[str, Any]
    note: str = "two maps"


torch.export.register_dataclass(Detection)


class Sizes(NamedTuple):
    """A named tuple among the results."""

    mean: Tensor
    nothing: None


class Detector(nn.Module):
    """Two convolutions and a linear head, with an optional argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(
        self, image: Tensor, factor: float = 1.0, *, mask: Tensor | None = None
    ) -> Any:
        y = self.body(self.stem(image).relu()).relu()
        if mask is not None:
            y = y * mask
        scores = self.head(y.mean((2, 3))) * factor
        return Detection(
            scores, {"y": [y, (scores, 3)], "sizes": Sizes(y.mean(), None)}
        )


def images(count: int, *, seed: int = 0, size: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, size, size, generator=generator)


def calibrated_detector(target: str = "onnxruntime") -> nn.Module:
    torch.manual_seed(0)
    model = Detector().eval()
    # Weights of 7 bits: products of 8-bit ones overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target=target, example=images(2))
    torchq.calibrate(model, [images(8)], progress=False)
    return model


class EngineContract:
    """Tests of an engine, each on the same small detector."""

    #: The number of images of most calls, for an engine that takes that of its example alone.
    usual_batch = 2

    def test_it_names_its_engine(self, engine: Engine, deployed: Any) -> None:
        assert deployed.target == engine.name
        assert not deployed.training

    def test_results_are_those_of_the_simulation(
        self, deployed: nn.Module, simulated: nn.Module
    ) -> None:
        x = images(self.usual_batch, seed=1)
        got = deployed(x)
        expected = simulated(x)
        assert sqnr(got.scores, expected.scores) > BOUND_DB
        assert sqnr(got.maps["y"][0], expected.maps["y"][0]) > BOUND_DB

    def test_results_have_the_structure_of_the_model(self, deployed: nn.Module) -> None:
        got = deployed(images(1))
        assert type(got) is Detection
        assert got.note == "two maps"
        assert list(got.maps) == ["y", "sizes"]
        assert type(got.maps["y"]) is list
        scores, three = got.maps["y"][1]
        assert three == 3
        assert scores is got.scores
        assert type(got.maps["sizes"]) is Sizes
        assert got.maps["sizes"].nothing is None
        assert got.maps["sizes"].mean.shape == ()

    def test_the_signature_is_that_of_the_model(self, deployed: nn.Module) -> None:
        parameters = inspect.signature(deployed.forward).parameters
        assert list(parameters)[:2] == ["image", "factor"]
        assert parameters["factor"].default == 1.0

    @pytest.mark.parametrize("count", [0, 1, 5])
    def test_the_batch_is_open(
        self, deployed: nn.Module, simulated: nn.Module, count: int
    ) -> None:
        x = images(count)
        got = deployed(x)
        expected = simulated(x)
        assert got.scores.shape == expected.scores.shape
        assert got.scores.dtype is torch.float32
        assert got.maps["y"][0].shape == expected.maps["y"][0].shape

    def test_the_size_is_open_where_the_model_accepts_any(
        self, deployed: nn.Module, simulated: nn.Module
    ) -> None:
        x = images(1, size=20)
        assert sqnr(deployed(x).scores, simulated(x).scores) > BOUND_DB

    def test_keywords_work_and_defaults_may_be_repeated(
        self, deployed: nn.Module
    ) -> None:
        x = images(1)
        expected = deployed(x).scores
        assert torch.equal(deployed(image=x).scores, expected)
        assert torch.equal(deployed(x, 1.0, mask=None).scores, expected)

    def test_inputs_may_have_any_layout_and_history(self, deployed: nn.Module) -> None:
        x = images(self.usual_batch)
        expected = deployed(x).scores
        for other in (
            x.contiguous(memory_format=torch.channels_last),
            x.repeat(2, 1, 1, 1)[::2].clone().requires_grad_(),
            torch.cat([x, x], 3)[..., :12],
        ):
            with torch.no_grad():
                same = other.detach()[:1]
            # Not equal: engines add in another order for another number of images.
            assert sqnr(deployed(other).scores[:1], deployed(same).scores) > BOUND_DB
        assert torch.equal(deployed(x).scores, expected)

    def test_model_and_example_may_be_channels_last(
        self, engine: Engine, simulated: nn.Module, deployed: nn.Module
    ) -> None:
        last = torch.channels_last
        model = copy.deepcopy(simulated).to(memory_format=last)
        example = images(1).contiguous(memory_format=last)
        result = torchq.deploy(model, example, target=engine)
        x = images(self.usual_batch, seed=1)
        assert sqnr(result(x).scores, deployed(x).scores) > BOUND_DB

    def test_the_results_of_a_call_are_not_overwritten_by_the_next(
        self, deployed: nn.Module
    ) -> None:
        first = deployed(images(1)).scores
        kept = first.clone()
        deployed(images(1, seed=5))
        assert torch.equal(first, kept)

    def test_wrong_calls_are_errors(self, deployed: nn.Module) -> None:
        x = images(1)
        for args, kwargs in (
            ((), {}),
            ((x,), {"unknown": 1}),
            ((x.to(torch.uint8),), {}),
            ((x.double(),), {}),
        ):
            with pytest.raises((TypeError, RuntimeError)):
                deployed(*args, **kwargs)
        with pytest.raises((ValueError, RuntimeError)):
            deployed(x[:, :2])

    @pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
    def test_copies_compute_the_same(self, deployed: nn.Module, how: str) -> None:
        x = images(self.usual_batch)
        expected = deployed(x).scores
        if how == "deepcopy":
            twin = copy.deepcopy(deployed)
        elif how == "pickle":
            twin = pickle.loads(pickle.dumps(deployed))
        else:
            file = io.BytesIO()
            torch.save(deployed, file)
            file.seek(0)
            twin = torch.load(file, weights_only=False)
        assert torch.equal(twin(x).scores, expected)
        assert twin.target == deployed.target

    def test_threads_may_share_a_module(self, deployed: nn.Module) -> None:
        batches = [images(1, seed=seed) for seed in range(24)]
        expected = [deployed(x).scores for x in batches]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda x: deployed(x).scores, batches * 3))
        assert all(map(torch.equal, got, expected * 3))

    def test_the_summary_describes_it(self, deployed: nn.Module) -> None:
        actual = torchq.summary(deployed)
        assert actual.layers or actual.float_modules
        assert all(row.bytes > 0 for row in actual.layers)
