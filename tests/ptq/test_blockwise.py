"""Layers as matrices, blocks of a model, runs of one block, and what is kept of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.ptq import gptq_
from torchq.ptq.layers import find_layers
from torchq.ptq.replay import Replay, copied, find_blocks
from torchq.workflow.layer_matrices import (
    input_matrix,
    output_matrix,
    weight_from_matrix,
    weight_matrix,
)

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Linear(6, 4), (5, 6)),
    (lambda: nn.Linear(6, 4), (2, 3, 6)),
    (lambda: nn.Linear(6, 4), (6,)),
    (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2, groups=2), (2, 4, 8, 7)),
    (lambda: nn.Conv2d(4, 6, (4, 2), padding="same", dilation=2), (2, 4, 8, 7)),
    (lambda: nn.Conv2d(4, 8, 3, stride=2, padding=(1, 2), groups=4), (2, 4, 8, 7)),
    (lambda: nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect"), (4, 8, 7)),
    (lambda: nn.Conv2d(4, 8, 1, padding="valid"), (2, 4, 8, 7)),
    (lambda: nn.Conv3d(4, 6, (1, 2, 3), padding=(0, 1, 1)), (2, 4, 3, 5, 6)),
]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_a_layer_is_a_product_of_matrices(
    make: Callable[[], Any], shape: tuple[int, ...], generator: torch.Generator
) -> None:
    layer = make().double()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    product = weight_matrix(layer, layer.weight) @ input_matrix(layer, x)
    expected = output_matrix(layer, layer(x))
    torch.testing.assert_close(product + layer.bias.view(len(product), -1, 1), expected)
    matrix = weight_matrix(layer, layer.weight)
    assert torch.equal(weight_from_matrix(layer, matrix), layer.weight)


class Residual(nn.Module):
    """Two layers around which a shortcut goes."""

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.inplace = inplace

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu())
        if self.inplace:
            y += x
            return y.relu_()
        return (y + x).relu()


class Net(nn.Module):
    """A stem, a chain of blocks, a skip connection around all of it, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(
            Residual(), nn.Sequential(Residual(inplace=True), Residual())
        )
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        start = self.stem(x)
        return self.head(self.stages(start).add_(start))


def quantized(model: nn.Module) -> Any:
    torch.manual_seed(0)
    torchq.quantize_(
        model.eval(),
        torchq.recipes.integer(3, 4),
    )
    torchq.calibrate(model, batches(), on_unseen="disable", progress=False)
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 4, generator=generator) for n in (5, 3)]


def prepared(model: nn.Module) -> tuple[Replay, list[str]]:
    layers, _ = find_layers("test", model)
    replay = Replay("test", model, batches())
    blocks, _ = find_blocks(model, layers, replay.count_calls())
    replay.use_blocks(blocks)
    return replay, [block.name for block in blocks]


def test_blocks_follow_the_structure() -> None:
    model = quantized(Net())
    layers, _ = find_layers("test", model)
    calls = Replay("test", model, batches()).count_calls()
    blocks, skipped = find_blocks(model, layers, calls)
    names = ["stem", "stages.0", "stages.1.0", "stages.1.1", "head"]
    assert [block.name for block in blocks] == names
    assert list(blocks[1].layers) == ["stages.0.first", "stages.0.second"]
    assert skipped == {"unused": "no batch reached it"}
    chosen, _ = find_blocks(model, layers, calls, "stages.*")
    assert [block.name for block in chosen] == ["stem", "stages.0", "stages.1", "head"]
    with pytest.raises(
        ConfigError, match=r"got nothing\.\*, which matches no module with layers"
    ):
        find_blocks(model, layers, calls, "nothing.*")


def test_replayed_runs_equal_runs_of_the_whole_model() -> None:
    """The head sees what it sees in a whole run, in float and quantized."""
    model = quantized(Net())
    seen: dict[str, list[Tensor]] = {"float": [], "quantized": []}
    for kind, actual in seen.items():
        with (
            torch.no_grad(),
            torchq.disabled(model) if kind == "float" else torch.no_grad(),
        ):
            handle = model.head.register_forward_pre_hook(
                lambda _, args, f=actual: f.append(args[0])
            )
            for batch in batches():
                model(batch)
            handle.remove()
    with torch.no_grad():
        replay, names = prepared(model)
        for number in range(len(names)):
            for kind in ("float", "quantized"):
                replay.finish(number, kind)  # type: ignore[arg-type]
        last = len(names) - 1
        for kind, actual in seen.items():
            for index, expected in enumerate(actual):
                got = replay.run(last, index, kind, ["head"], until="inputs")  # type: ignore
                assert torch.equal(got.inputs["head"], expected)
                assert got.outputs == {}
    assert all("forward" not in vars(module) for module in model.modules())
    assert not torch.equal(seen["float"][0], seen["quantized"][0])


class Added(nn.Module):
    """An addition in a module, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.add = torchq.nn.QuantAdd()
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        return self.add(x, self.layer(x))


def test_additions_of_shortcuts_are_found_however_they_are_written() -> None:
    report = gptq_(quantized(Net()), batches(), progress=False)
    repairing = {
        name for name, layer in report.layers.items() if layer.repairs_shortcut
    }
    assert repairing == {f"stages.{block}.second" for block in ("0", "1.0", "1.1")}
    report = gptq_(
        quantized(nn.Sequential(Added())), batches(), block="0", progress=False
    )
    assert report.layers["0.layer"].repairs_shortcut
    assert report.skipped == {"0.twice": "it or a module around it runs several times"}


class Pair(NamedTuple):
    a: Tensor
    b: Any


def test_copies_are_whole_and_keep_structures() -> None:
    """A cache of keys and values is an object that a block may write to; a function is none."""
    blank = torch.zeros(()).expand(2, 3)
    value = Pair(
        torch.arange(4.0), {"x": [blank, 7, None], "cache": {1, 2}, "f": torch.add}
    )
    got = copied(value)
    assert isinstance(got, Pair)
    assert got.b["x"][1:] == [7, None]
    assert got.b["f"] is torch.add
    assert got.b["x"][0].untyped_storage().nbytes() == 4
    got.a.fill_(9)
    got.b["cache"].add(3)
    assert value.a.tolist() == [0, 1, 2, 3]
    assert value.b["cache"] == {1, 2}


X = torch.rand(32, 6, generator=torch.Generator().manual_seed(0))


class Given(nn.Module):
    """Four blocks of two layers, in a forward that is given."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) for _ in range(4)
        )
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def chain(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = block(x)
        assert x.shape[1] == x.size(1) == 6  # Shapes are known of what is forgotten.
    return x


def with_function(net: Any, x: Tensor) -> Tensor:
    for block in net.blocks:
        x = 2 * block(x)
    return x


def with_long_shortcut(net: Any, x: Tensor) -> Tensor:
    first = net.blocks[0](x)
    x = net.blocks[1](first)
    x = net.blocks[2](x)
    return net.blocks[3](x + first)


def rounded(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[set[int], dict[str, Any]]:
    """Return the blocks whose outputs were forgotten, and the values of the rounded model."""
    model = Given(run).eval()
    actual = set()
    torchq.quantize_(model, torchq.recipes.integer(3, None, weight_method="max"))
    forget = Replay._forget

    def noted(replay: Replay, number: int, index: int) -> None:
        actual.add(number)
        forget(replay, number, index)

    with monkeypatch.context() as patched:
        patched.setattr(Replay, "_forget", noted)
        report = gptq_(model, [X, X + 1], block="blocks.*", progress=False)
    assert len(report.layers) == 8
    return actual, model.state_dict()


@pytest.mark.parametrize(
    ("run", "forgotten"),
    [
        (chain, {0, 1}),
        (with_function, set()),
        (with_long_shortcut, {1}),
    ],
)
def test_what_nothing_reads_is_forgotten(
    run: Any, forgotten: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    actual, state = rounded(run, monkeypatch)
    assert actual == forgotten
    monkeypatch.setattr(Replay, "_last_readers", lambda self, blocks: {})
    nothing, expected = rounded(run, monkeypatch)
    assert nothing == set()
    for name, value in state.items():
        assert torch.equal(value, expected[name]), name
