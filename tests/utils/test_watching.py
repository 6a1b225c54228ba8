"""Calls of modules that are seen, and results that take the place of others."""

from typing import Any

import pytest
import torch
from torch import nn

from torchq.utils import watching


def test_calls_are_seen_before_and_after_and_results_are_replaced() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Flatten())
    seen: list[Any] = []

    def replace(args: Any, kwargs: Any, out: Any) -> Any:
        seen.append(("after", out.tolist()))
        return out + 1

    before = [(model[1], lambda args, kwargs, out: seen.append(("before", args[0].tolist(), out)))]
    x = torch.tensor([[-1.0, 2.0]])
    with watching(before, before=True), watching([(model[0], replace)]):
        assert model(x).tolist() == [[1.0, 3.0]]
    assert seen == [("after", [[0.0, 2.0]]), ("before", [[1.0, 3.0]], None)]
    with pytest.raises(KeyError), watching(before, before=True):
        raise KeyError
    assert model(x).tolist() == [[0.0, 2.0]] and len(seen) == 2
