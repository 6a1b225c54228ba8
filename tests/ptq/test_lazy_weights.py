"""Algorithms over weights that lie in files, against the same with all weights in memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.ptq import LazyWeights, RunOptions, adaround_, gptq_
from torchq.ptq.gptq.statistics import MomentSums

BATCHES = [torch.rand(24, 6, generator=torch.Generator().manual_seed(n)) for n in range(2)]


STEPS: dict[Any, dict[str, Any]] = {gptq_: {}, adaround_: {"steps": 4, "finish": 0}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net() -> Any:
    torch.manual_seed(0)
    model = Net().eval()
    torchq.quantize_(model, torchq.recipes.integer(3, None, weight_method="max"))
    return model


def loaded(model: Any) -> list[bool]:
    """Return for each block if its parameters have values."""
    return [bool(block.up.weight.isfinite().all()) for block in model.blocks]


class Attention(nn.Module):
    """Three layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.tanh(self.q(x)) * self.k(x) * self.v(x))


@pytest.mark.parametrize("target", ["weight", "block"])
def test_the_statistics_of_one_layer_are_in_memory_at_once(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    alive: WeakSet[MomentSums] = WeakSet()

    class Counted(MomentSums):
        def __init__(self, dtype: torch.dtype) -> None:
            nonlocal most
            super().__init__(dtype)
            alive.add(self)
            most = max(most, len(alive))

    monkeypatch.setattr("torchq.ptq.gptq.block.MomentSums", Counted)
    states, peaks = [], []
    for is_lazy in (False, True):
        torch.manual_seed(0)
        model, most = nn.Sequential(Attention(), Attention()).eval(), 0
        torchq.quantize_(model, torchq.recipes.integer(3, None, weight_method="max"))
        with LazyWeights(model, tmp_path) if is_lazy else nullcontext() as weights:
            run = RunOptions(weights=weights)
            gptq_(model, BATCHES, target=target, run=run, progress=False)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        peaks.append(most)
    assert peaks == [3, 1]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


def test_only_large_layers_with_lazy_weights_are_summed_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.dtype] = []

    class Noted(MomentSums):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__(dtype)
            seen.append(dtype)

    monkeypatch.setattr("torchq.ptq.gptq.block.MomentSums", Noted)
    monkeypatch.setattr("torchq.ptq.gptq.block._MANY_INPUTS", 8)  # those of "down"
    small, large = torch.float64, torch.float32
    for dtype, expected in ((torch.float32, [small, large] * 3), (torch.float64, [small] * 6)):
        for is_lazy in (False, True):
            model = net().blocks.to(dtype)
            chain, batches = nn.Sequential(*model), [batch.to(dtype) for batch in BATCHES]
            seen.clear()
            with LazyWeights(chain, tmp_path) if is_lazy else nullcontext() as weights:
                report = gptq_(chain, batches, run=RunOptions(weights=weights), progress=False)
            assert seen == (expected if is_lazy else [small] * 6)
            assert all(layer.error_after < 1 for layer in report.layers.values())


@pytest.mark.parametrize("function", STEPS)
def test_the_result_is_that_of_a_model_in_memory(function: Any, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "progress": False,
        **({"steps": 4, "finish": 0} if function is adaround_ else {}),
    }
    expected, model, seen = net(), net(), []
    function(expected, BATCHES, **arguments)
    watched = model.blocks[1].down.register_forward_pre_hook(lambda *_: seen.append(loaded(model)))
    with LazyWeights(model, tmp_path) as weights:
        assert loaded(model) == [False] * 3 and model.blocks[0].up.weight.shape == (8, 6)
        function(model, BATCHES, run=RunOptions(weights=weights), **arguments)
        watched.remove()
        assert loaded(model) == [False] * 3
        inside = model(BATCHES[0])
        with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
            model.blocks[0].up.weight.copy_(torch.zeros(8, 6))
    assert {tuple(state) for state in seen} == {(False, True, False)}
    assert torch.equal(inside, expected(BATCHES[0]))
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"block{n}.pt" for n in range(3)]
    torchq.save(model, tmp_path / "model.pt")
    assert torch.equal(torchq.load(net(), tmp_path / "model.pt")(BATCHES[0]), inside)


def test_a_model_without_memory_is_read_from_a_source(tmp_path: Path) -> None:
    floats = {name: value.clone() for name, value in net().named_parameters()}
    with torch.device("meta"):
        model = Net().eval()
    read: list[str] = []

    def source(name: str) -> Tensor:
        read.append(name)
        return floats[name]

    with LazyWeights(model, tmp_path, block="blocks.*", source=source) as weights:
        assert sorted(read) == ["first.bias", "first.weight", "head.bias", "head.weight"]
        torchq.quantize_(model, torchq.recipes.integer(3, None, weight_method="max"))
        gptq_(model, BATCHES, run=RunOptions(weights=weights), progress=False)
    expected = net()
    gptq_(expected, BATCHES, progress=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name]), name


def test_an_error_brings_all_values_back(tmp_path: Path) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupted(model: nn.Module, batch: Tensor) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), LazyWeights(model, tmp_path) as weights:
        gptq_(model, BATCHES, run=RunOptions(forward=interrupted, weights=weights), progress=False)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LazyWeights(model, tmp_path / "nowhere").__enter__()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_shared_parameters_stay_in_memory(tmp_path: Path) -> None:
    model = net()
    model.head.weight = nn.Parameter(torch.zeros(4, 6))
    model.first.weight = model.blocks[0].down.weight
    with LazyWeights(model, tmp_path):
        assert bool(model.first.weight.isfinite().all())
        assert bool(model.blocks[0].down.weight.isfinite().all())
        assert not bool(model.blocks[0].up.weight.isfinite().any())


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LazyWeights: got a model without a list of modules"):
        LazyWeights(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ConfigError, match=r"LazyWeights: got layers\.\*, which matches no module"):
        LazyWeights(net(), tmp_path, block="layers.*")
    with torch.device("meta"):
        model = Net()
    with (
        pytest.raises(ConfigError, match=r"LazyWeights: .* is on the meta device"),
        LazyWeights(model, tmp_path),
    ):
        pass
