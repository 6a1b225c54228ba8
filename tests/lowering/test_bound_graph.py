"""Bound graphs: a deployed model calls its kernels directly, and notices every change."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import Residual
from torchq.lowering import onednn
from torchq.lowering.codes import Quantize
from torchq.lowering.conv import Int8Conv
from torchq.lowering.traced import TracedModel


@pytest.fixture
def x() -> Tensor:
    """Return a small image."""
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def int8(x: Tensor) -> TracedModel:
    """Return a deployed network with a residual addition, pooling and a linear layer."""
    torch.manual_seed(0)
    model = Residual().eval()
    torchq.fuse_(model, x, verify=False)
    torchq.quantize_(model, target="tensorrt")
    torchq.calibrate(model, [x], progress=False)
    result = torchq.deploy(model)
    assert isinstance(result, TracedModel)
    return result


def plain(model: TracedModel, *args: Any) -> Any:
    """Return what the code of the graph computes, without a bound graph."""
    return inspect.unwrap(type(model).forward)(model, *args)


def layers(model: nn.Module) -> list[Int8Conv]:
    """Return the integer convolutions of a model."""
    return [m for m in model.modules() if isinstance(m, Int8Conv)]


def calls_of_modules(monkeypatch: pytest.MonkeyPatch, model: nn.Module, x: Tensor) -> int:
    """Return how many integer convolutions one call of the model runs as modules."""
    seen: list[object] = []
    original = Int8Conv.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            Int8Conv, "forward", lambda self, *args: (seen.append(self), original(self, *args))[1]
        )
        model(x)
    return len(seen)


def test_the_second_call_binds_and_the_third_calls_no_module(
    int8: TracedModel, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = len(layers(int8))
    first = int8(x)
    assert calls_of_modules(monkeypatch, int8, x) == count
    assert calls_of_modules(monkeypatch, int8, x) == int(not onednn.available()) * count
    assert torch.equal(first, int8(x))


@pytest.mark.parametrize("change", ["scale", "state", "dtype", "replaced", "hook", "forward"])
def test_a_change_of_a_layer_is_noticed(int8: TracedModel, x: Tensor, change: str) -> None:
    for _ in range(3):
        before = int8(x)
    layer = layers(int8)[1]
    if change == "scale":
        layer.weight_scale = layer.weight_scale * 2
    elif change == "state":
        state = {k: v * 2 if "scale" in k else v for k, v in int8.state_dict().items()
                 if isinstance(v, Tensor)}  # fmt: skip
        int8.load_state_dict(state, strict=False)
    elif change == "dtype":
        int8.to(torch.float64)
        x = x.double()
    elif change == "replaced":
        name = next(n for n, m in int8.named_modules() if m is layer)
        other = copy.deepcopy(layer)
        other.weight_scale = layer.weight_scale * 2
        torchq.utils.set_submodule(int8, name, other)
    elif change == "hook":
        layer.register_forward_hook(lambda module, args, y: torch.zeros_like(y))
    else:
        original = layer.forward
        layer.forward = lambda *args: torch.zeros_like(original(*args))  # type: ignore[assignment]
    for _ in range(3):
        after = int8(x)
    assert after.dtype is x.dtype
    assert before.dtype is not after.dtype or not torch.equal(before, after)
    assert torch.equal(after, plain(int8, x))


def test_an_edited_graph_is_bound_anew(int8: TracedModel, x: Tensor) -> None:
    for _ in range(3):
        before = int8(x)
    output = next(node for node in int8.graph.nodes if node.op == "output")
    with int8.graph.inserting_before(output):
        output.args = (int8.graph.call_function(torch.neg, output.args),)
    int8.recompile()
    for _ in range(3):
        assert torch.equal(int8(x), -before)


def test_arguments_by_name_and_nan_are_as_before(int8: TracedModel, x: Tensor) -> None:
    for _ in range(3):
        assert torch.equal(int8(x=x), int8(x))
    with pytest.raises(torchq.errors.QuantizationError, match="got NaN"):
        int8(torch.full_like(x, torch.nan))
    with pytest.raises(TypeError, match=r"expected torch\.float32"):
        int8(x.double())
    assert list(inspect.signature(int8.forward).parameters) == ["x"]


class Seen(nn.Module):
    """Identity that notes whether it was called in inference mode; a foreign module to torch."""

    def __init__(self, modes: list[bool]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(torch.is_inference_mode_enabled())
        return x


def inference_modes(monkeypatch: pytest.MonkeyPatch, model: TracedModel, x: Tensor) -> set[bool]:
    """Return whether a bound graph runs in inference mode, as its first module sees it."""
    seen = set[bool]()
    quantize = Quantize.forward
    with monkeypatch.context() as patch:
        patch.setattr(
            Quantize,
            "forward",
            lambda self, x: (seen.add(torch.is_inference_mode_enabled()), quantize(self, x))[1],
        )
        for _ in range(3):  # the first call runs the code, the second one binds
            seen.clear()
            model(x)
    return seen


def test_calls_without_gradients_run_in_inference_mode_and_return_ordinary_tensors(
    int8: TracedModel, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert inference_modes(monkeypatch, int8, x) == {False}
    with torch.no_grad():
        assert inference_modes(monkeypatch, int8, x) == {True}
        result = int8(x)
    assert not result.is_inference()
    assert torch.equal(result.add_(1), int8(x) + 1)
    with torch.inference_mode():
        assert int8(x).is_inference()


@pytest.mark.parametrize("reason", ["foreign module", "large results"])
def test_inference_mode_is_left_out_where_it_could_harm(
    int8: TracedModel, x: Tensor, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    output = next(node for node in int8.graph.nodes if node.op == "output")
    (result,) = output.args
    with int8.graph.inserting_before(output):
        if reason == "foreign module":
            modes: list[bool] = []
            int8.add_submodule("seen", Seen(modes))
            output.args = (int8.graph.call_module("seen", (result,)),)
        else:
            output.args = (int8.graph.call_function(torch.tile, (result, (9000,))),)
    int8.recompile()
    with torch.no_grad():
        assert inference_modes(monkeypatch, int8, x) == {False}
