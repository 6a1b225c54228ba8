"""A model that runs for a while is afterwards what it was."""

import collections
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.utils import (
    RandomState,
    counting_operations,
    random_kept,
    random_seeded,
    state_kept,
    undone_on_error,
)


class Cache:
    """What a forward keeps in an object of a class of its own."""

    def __init__(self) -> None:
        self.keys = torch.zeros(2)
        self.count = 0


class Keeps(nn.Module):
    """Keeps state in every way that a forward has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("buffer", torch.zeros(2))
        self.plain = torch.zeros(2)
        self.count = 0
        self.items = [torch.zeros(2)]
        self.rows: dict[str, Any] = {"a": [torch.zeros(2)]}
        self.queue = collections.deque([1.0], maxlen=3)
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        self.buffer += 1
        self.plain.add_(1)
        self.count += 1
        self.items[0].add_(1)
        self.items.append(x)
        self.rows["a"][0].add_(1)
        self.rows["b"] = x
        self.queue.append(x.sum())
        self.cache.keys.add_(1)
        self.cache.keys = self.cache.keys + 1
        self.cache.count += 1
        self.fc.weight.data = self.fc.weight.data + 1
        self.new = x
        y: Tensor = self.fc(x) + self.buffer.sum()
        return y


def snapshot(model: Any) -> list[Any]:
    """Return what ``Keeps`` changes, as plain numbers."""
    tensors = [
        model.buffer,
        model.plain,
        *model.items,
        *model.rows["a"],
        model.cache.keys,
    ]
    numbers = [tensor.tolist() for tensor in (*tensors, model.fc.weight)]
    state = [
        model.count,
        len(model.items),
        sorted(model.rows),
        list(model.queue),
    ]
    return [*numbers, *state, model.cache.count, hasattr(model, "new")]


X = torch.ones(2, 4)


def test_all_that_a_forward_keeps_is_put_back() -> None:
    model = Keeps()
    before = snapshot(model)
    cache = model.cache
    with torch.no_grad(), state_kept(model):
        model(X)
        assert snapshot(model) != before
    assert snapshot(model) == before
    assert model.cache is cache


def test_all_that_a_call_that_fails_kept_is_put_back() -> None:
    model = Keeps()
    before = snapshot(model)
    numbers = [
        model.buffer,
        model.plain,
        *model.items,
        *model.rows["a"],
        model.cache.keys,
    ]

    def fail() -> None:
        with undone_on_error(model, written=numbers):
            model(X)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    assert snapshot(model) == before


CALLS: dict[str, Any] = {
    "plan": lambda model: torchq.plan(model, target="onnxruntime", example=X),
    "quantize_": lambda model: torchq.quantize_(
        model, target="onnxruntime", example=X, progress=False
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_plans_and_converts_leaves_no_state(name: str) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.cache = Cache()
            self.register_buffer("past", torch.zeros(2, 4))

        def forward(self, x: Tensor) -> Tensor:
            self.cache.count += 1
            y: Tensor = self.fc(x + self.past) * self.cache.count
            self.past.copy_(y)
            return y

    model = Counts().eval()
    CALLS[name](model)
    assert model.cache.count == 0
    assert not model.past.any()


def test_random_numbers_go_on_as_if_none_had_been_drawn() -> None:
    numpy = pytest.importorskip("numpy")
    state = RandomState.now()
    with random_kept():
        first = (
            torch.rand(2).tolist(),
            random.random(),
            numpy.random.rand(),
        )
    assert (
        torch.rand(2).tolist(),
        random.random(),
        numpy.random.rand(),
    ) == first
    state.restore()
    assert torch.rand(2).tolist() == first[0]


def test_a_block_has_numbers_of_its_own_seed_and_leaves_none_behind() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(7)
    with random_seeded(3):
        assert torch.equal(torch.rand(2), expected)
    number = torch.rand(2)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(2), number)


def test_operations_are_counted_where_a_parameter_is_handed_on() -> None:
    """torch's counter raised an AssertionError; CaiT of timm expands its class token so."""

    class Inner(nn.Module):
        def forward(self, x: Tensor, token: Tensor) -> Tensor:
            return torch.cat([token, x], 1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 4))
            self.inner = Inner()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.fc(self.inner(x, self.token.expand(x.shape[0], -1, -1)))
            return y

    model = Outer()
    with torch.no_grad(), counting_operations(model) as total:
        model(torch.ones(3, 5, 4))
    # Two operations for each of 3 * 6 rows, 4 inputs and 2 results.
    assert total() == 2 * 3 * 6 * 4 * 2
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torchq.plan(model.eval(), example=torch.ones(3, 5, 4)).share.quantized == 1
