"""A whole model is traced at module level where possible, else as operators, and is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from torchq.errors import GraphError
from torchq.graph import GraphRunner, trace

X = torch.linspace(-2, 2, 24).reshape(2, 12)


class Branching(nn.Module):
    """Looks at a value in a way that torch.fx cannot follow, and torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(12, 4, 1)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            x = x + 1
        return self.norm(self.conv(x[..., None]))


def test_models_that_fx_cannot_follow_become_operators() -> None:
    model = Branching()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = trace(model, X)
    assert found.level == "aten"
    assert "TraceError" in found.lost[0] and "Sizes are those of the example" in found.lost[1]
    assert model.training and model.norm.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    runner = GraphRunner(found.graph_module)
    model.eval()
    with torch.no_grad():
        assert torch.equal(runner.run(X), model(X))
        assert torch.equal(runner.run(X, outputs="conv"), model.conv(X[..., None] + 1))


def test_code_that_takes_another_branch_while_it_is_traced_becomes_operators() -> None:
    class Typed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if isinstance(x, Tensor) else x

    found = trace(Typed(), X)
    assert found.level == "aten" and "something else" in found.lost[0]
    assert torch.equal(GraphRunner(found.graph_module).run(X), X + 1)


class Scaling(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x if scale is None else x * scale


def test_arguments_of_the_example_are_arguments_of_the_trace() -> None:
    net = Scaling()
    scale = torch.full((1,), 3.0)
    found = trace(net, {"x": X, "scale": scale})
    assert found.level == "module" and len(found.lost) == 1
    got = GraphRunner(found.graph_module).run({"x": X, "scale": scale * 2})
    assert torch.equal(got, X * 6)
    fixed = trace(net, X)
    assert "Argument 'scale' is always None: other values are refused." in fixed.lost
    with pytest.raises(GraphError, match="scale"):
        GraphRunner(fixed.graph_module).run({"x": X, "scale": scale})


def test_models_that_nothing_can_trace_are_refused() -> None:
    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum().item() > 0 else x

    with pytest.raises(GraphError, match=r"trace: got a Untraceable that torch.fx cannot follow"):
        trace(Untraceable(), X)


def test_a_trace_leaves_what_a_forward_stores() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(12, 2), None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.layer(x)
            return self.last * torch.tensor([2.0, 3.0])

    model = Storing()
    names = set(vars(model))
    found = trace(model, X)
    assert model.last is None and set(vars(model)) == names
    assert isinstance(found.graph_module, fx.GraphModule)
    assert torch.equal(GraphRunner(found.graph_module).run(X), model.eval()(X))


def test_random_numbers_do_not_make_a_trace_differ() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    torch.rand(3)
    before = torch.random.get_rng_state()
    assert trace(Noisy(), X).level == "module"
    assert torch.equal(torch.random.get_rng_state(), before)
