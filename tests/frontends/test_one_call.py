"""Functions of which a call stays one node of a graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.frontends.onnx_writer import Writer
from torchq.errors import FrontendError
from torchq.frontends.building.one_call import is_one_call, one_call
from torchq.frontends.onnx.converters import vision


@one_call
def twice(x: Tensor, *others: Tensor) -> Tensor:
    """Add a tensor to itself, and others to that."""
    return sum(others, x + x)


@one_call
def from_a_list(tensors: list[Tensor], at: slice, options: dict[str, Tensor]) -> Tensor:
    return tensors[0][at] + options["bias"]


class Calls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = twice(x, x)
        return from_a_list(
            [torch.ones(4)],
            slice(0, 4),
            {"bias": y},
        )


def test_a_trace_keeps_the_call_whole() -> None:
    traced = fx.symbolic_trace(Calls())
    called = [n.target for n in traced.graph.nodes if n.op == "call_function"]
    assert called == [twice, from_a_list]
    again = fx.symbolic_trace(traced)
    assert [n.target for n in again.graph.nodes] == [
        n.target for n in traced.graph.nodes
    ]
    x = torch.randn(4)
    assert torch.equal(again(x), Calls()(x))


def test_it_is_the_function_by_another_name_only() -> None:
    assert is_one_call(twice)
    assert not is_one_call(torch.add)
    assert twice.__name__ == "twice"
    assert twice.__doc__.startswith("Add a tensor")
    assert torch.equal(
        twice(torch.ones(2)),
        torch.full((2,), 2.0),
    )


def test_a_converter_with_another_function_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vision, "resize", vision.resize.__wrapped__)
    w = Writer(17)
    scales = w.weight(torch.tensor([1.0, 1.0, 1.5, 2.5]))
    y = w.node("Resize", w.input("x", [1, 2, 4, 4]), "", scales, mode="cubic")
    with pytest.raises(FrontendError, match=r"vision\.resize: got .*one_call"):
        torchq.from_onnx(w.model(y))
