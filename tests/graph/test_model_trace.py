"""Models are traced at module level where possible, else as operators, and are left alone."""

import pytest
import torch
from torch import Tensor, fx, nn

from torchq.errors import GraphError
from torchq.graph import ForwardTracer, GraphRunner, trace, trace_modules

IMAGE = torch.arange(24.0).reshape(2, 4, 3)


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
    assert torch.equal(trace_modules(model)(IMAGE), model(IMAGE))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.split(2, 1),
        lambda x: x.unbind(1),
        lambda x: x,
    ],
)
def test_parts_of_an_unknown_number_are_refused(cut) -> None:
    with pytest.raises(fx.proxy.TraceError, match="cannot be iterated"):
        ForwardTracer().trace(Parts(cut))


def test_fewer_chunks_than_asked_for_are_an_error_and_no_other_result() -> None:
    model = Parts(lambda x: x.chunk(3, 1))
    assert len(IMAGE.chunk(3, 1)) == 2
    with pytest.raises(IndexError):
        trace_modules(model)(IMAGE)


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
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        scale: float = 2.0,
        **rest: Tensor,
    ) -> Tensor:
        return x * scale if mask is None else x * mask


def test_arguments_are_given_by_name_as_before() -> None:
    traced = trace_modules(Options())
    assert torch.equal(
        traced(x=IMAGE, mask=None, scale=2.0),
        2 * IMAGE,
    )
    assert torch.equal(traced(IMAGE), 2 * IMAGE)
    with pytest.raises(AssertionError, match="mask"):
        traced(IMAGE, mask=IMAGE)
    with pytest.raises(AssertionError, match="scale"):
        traced(IMAGE, scale=3.0)


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
    actual = trace(model, X)
    assert actual.level == "aten"
    assert "decides by the values of tensors" in actual.lost[0]
    assert "Sizes are those of the example" in actual.lost[1]
    assert model.training
    assert model.norm.training
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )
    runner = GraphRunner(actual.graph_module)
    model.eval()
    with torch.no_grad():
        assert torch.equal(runner.run(X), model(X))
        assert torch.equal(
            runner.run(X, outputs="conv"),
            model.conv(X[..., None] + 1),
        )


def test_code_that_takes_another_branch_while_it_is_traced_becomes_operators() -> None:
    class Typed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if isinstance(x, Tensor) else x

    actual = trace(Typed(), X)
    assert actual.level == "aten"
    assert "something else" in actual.lost[0]
    assert torch.equal(
        GraphRunner(actual.graph_module).run(X),
        X + 1,
    )


class Scaling(nn.Module):
    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        return x if scale is None else x * scale


def test_arguments_of_the_example_are_arguments_of_the_trace() -> None:
    net = Scaling()
    scale = torch.full((1,), 3.0)
    actual = trace(net, {"x": X, "scale": scale})
    assert actual.level == "module"
    assert len(actual.lost) == 1
    got = GraphRunner(actual.graph_module).run({"x": X, "scale": scale * 2})
    assert torch.equal(got, X * 6)
    fixed = trace(net, X)
    assert "Argument 'scale' is always None: other values are refused." in fixed.lost
    with pytest.raises(GraphError, match="scale"):
        GraphRunner(fixed.graph_module).run({"x": X, "scale": scale})


def test_models_that_nothing_can_trace_are_refused() -> None:
    class Untraceable(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum().item() > 0 else x

    with pytest.raises(
        GraphError, match=r"trace: got a Untraceable that torch.fx cannot follow"
    ):
        trace(Untraceable(), X)


def test_a_trace_leaves_what_a_forward_stores() -> None:
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 2)
            self.last = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.layer(x)
            return self.last * torch.tensor([2.0, 3.0])

    model = Storing()
    names = set(vars(model))
    actual = trace(model, X)
    assert model.last is None
    assert set(vars(model)) == names
    assert isinstance(actual.graph_module, fx.GraphModule)
    assert torch.equal(
        GraphRunner(actual.graph_module).run(X),
        model.eval()(X),
    )


def test_random_numbers_do_not_make_a_trace_differ() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    torch.rand(3)
    before = torch.random.get_rng_state()
    assert trace(Noisy(), X).level == "module"
    assert torch.equal(torch.random.get_rng_state(), before)
