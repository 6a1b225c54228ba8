"""Calls that return one of their operands, whatever its values are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchq.graph.flow import record
from torchq.graph.values import ValueTracker


class _Calls(nn.Module):
    """Calls one function of a ReLU of its input, with numbers that it holds."""

    def __init__(self, function: Callable[["_Calls", Tensor], Tensor]) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.function = function
        self.register_buffer("one", torch.ones(1))
        self.register_buffer("zero", torch.zeros(()))
        self.register_buffer("ones", torch.ones(4))
        self.register_buffer("one_in_double", torch.ones(1, dtype=torch.float64))
        self.learned = nn.Parameter(torch.ones(1))
        self.plain = torch.tensor(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.relu(x))


_UNCHANGED: dict[str, Callable[[_Calls, Tensor], Tensor]] = {
    "times one": lambda m, x: x * 1.0,
    "one times": lambda m, x: 1 * x,
    "plus zero": lambda m, x: x + 0,
    "zero plus": lambda m, x: 0.0 + x,
    "minus zero": lambda m, x: x - 0,
    "over one": lambda m, x: x / 1,
    "torch.mul": lambda m, x: torch.mul(x, 1.0),
    "torch.add": lambda m, x: torch.add(x, 0, alpha=3),
    "keyword": lambda m, x: torch.add(x, other=0),
    "no part": lambda m, x: torch.add(x, m.one, alpha=0),
    "torch.sub": lambda m, x: torch.sub(x, m.one, alpha=0),
    "torch.div": lambda m, x: torch.div(x, m.one),
    "in place": lambda m, x: x.clone().mul_(1.0).add_(0),
    "buffer": lambda m, x: m.one * x + m.zero,
    "attribute": lambda m, x: m.plain * x,
    "made in the call": lambda m, x: x * torch.tensor(1.0),
    "computed of buffers": lambda m, x: x * (m.one + m.zero),
    "all": lambda m, x: x[:][..., :],
    "copies": lambda m, x: +x.detach().contiguous().clone(),
    "casts": lambda m, x: x.float().to(torch.float32).type_as(m.one),
}


@pytest.mark.parametrize("form", _UNCHANGED)
def test_operand_is_returned(form: str) -> None:
    flow = record(_Calls(_UNCHANGED[form]), torch.randn(2, 4))
    relu = next(call for call in flow.calls if call.module is not None)
    result = flow.calls[max(flow.outputs)]
    while result.returned:
        (source,) = result.returned
        result = flow.calls[source]
    assert result is relu


_COMPUTED: dict[str, Callable[[_Calls, Tensor], Tensor]] = {
    "twice": lambda m, x: x * 2,
    "times zero": lambda m, x: x * 0,
    "negative": lambda m, x: 0 - x,
    "reciprocal": lambda m, x: 1 / x,
    "half": lambda m, x: torch.add(m.zero, x, alpha=0.5),
    "floor": lambda m, x: torch.div(x, 1, rounding_mode="floor"),
    "learned": lambda m, x: x * m.learned,
    "computed of learned": lambda m, x: x * (m.learned.detach() * 1.0),
    "read": lambda m, x: x * (x.amax() * 0 + 1),
    "random": lambda m, x: x * torch.ones(1).bernoulli_(1.0),
    "several": lambda m, x: x * m.ones,
    "other type": lambda m, x: x * m.one_in_double,
    "cast": lambda m, x: x.double(),
    "other shape": lambda m, x: x[0] * m.ones[None, :1, None],
    "part": lambda m, x: x[:, :4],
    "new axis": lambda m, x: x[None],
}


@pytest.mark.parametrize("form", _COMPUTED)
def test_other_calls_compute(form: str) -> None:
    flow = record(_Calls(_COMPUTED[form]), torch.randn(2, 4))
    assert flow.calls[max(flow.outputs)].returned is None


def test_input_that_is_returned_has_no_call() -> None:
    model = nn.Module()
    model.forward = lambda x: x * 1  # type: ignore[method-assign, assignment]
    flow = record(model, torch.randn(2))
    assert flow.calls[-1].returned == ()


@pytest.mark.parametrize(
    ("move", "arguments"),
    [
        (Tensor.reshape, (4, 2)),
        (Tensor.flatten, ()),
        (Tensor.view, (2, 4)),
        (Tensor.transpose, (0, 1)),
    ],
)
def test_a_view_has_the_root_of_its_tensor_until_they_are_overwritten(
    move: Callable[..., Tensor], arguments: tuple[int, ...]
) -> None:
    tracker = ValueTracker()
    x = torch.arange(8.0).reshape(2, 4)
    root = tracker.root_of(x)
    moved = tracker.run(move, (x, *arguments), {})
    assert moved.data_ptr() == x.data_ptr()
    assert tracker.root_of(moved) == root
    x[0, 1] = -1.0
    assert tracker.root_of(x) != root
    assert tracker.root_of(moved) != root
