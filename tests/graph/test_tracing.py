"""Loops over the parts of a tensor trace where the code says how many parts there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from torchq.graph import ForwardTracer, trace_modules

X = torch.arange(24.0).reshape(2, 4, 3)


class Parts(nn.Module):
    def __init__(self, cut) -> None:
        super().__init__()
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.cut(x))
        parts.extend(-part for part in parts[:1])
        return torch.cat(parts, 1)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.chunk(2, 1),
        lambda x: x.chunk(chunks=2, dim=1),
        lambda x: torch.chunk(x, 4, 1),
        lambda x: x.split([1, 3], 1),
        lambda x: x.split((1, 3), dim=1),
        lambda x: torch.split(x, [2, 1, 1], dim=1),
        lambda x: torch.split(x, split_size_or_sections=[2, 2], dim=1),
    ],
)
def test_parts_of_a_known_number(cut) -> None:
    model = Parts(cut)
    assert torch.equal(trace_modules(model)(X), model(X))


@pytest.mark.parametrize("cut", [lambda x: x.split(2, 1), lambda x: x.unbind(1), lambda x: x])
def test_parts_of_an_unknown_number_are_refused(cut) -> None:
    with pytest.raises(fx.proxy.TraceError, match="cannot be iterated"):
        ForwardTracer().trace(Parts(cut))


def test_fewer_chunks_than_asked_for_are_an_error_and_no_other_result() -> None:
    model = Parts(lambda x: x.chunk(3, 1))
    assert len(X.chunk(3, 1)) == 2
    with pytest.raises(IndexError):
        trace_modules(model)(X)


def test_tracing_gives_buffers_and_containers_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: dict[str, list[Tensor]] = {"inputs": []}
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("mask", torch.full((1,), float("nan")).expand(4))
            self.register_buffer("table", torch.eye(2).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen["inputs"].append(x)
            return x * 2

    model = Counting()
    trace_modules(model, is_leaf=lambda module: False)
    assert model.calls == 0
    assert model.seen == {"inputs": []}


class Options(nn.Module):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0, **rest: Tensor
    ) -> Tensor:
        return x * scale if mask is None else x * mask


def test_arguments_are_given_by_name_as_before() -> None:
    traced = trace_modules(Options())
    assert torch.equal(traced(x=X, mask=None, scale=2.0), 2 * X)
    assert torch.equal(traced(X), 2 * X)
    with pytest.raises(AssertionError, match="mask"):
        traced(X, mask=X)
    with pytest.raises(AssertionError, match="scale"):
        traced(X, scale=3.0)
