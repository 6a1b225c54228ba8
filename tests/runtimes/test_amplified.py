"""Whether results differ by more than small changes of the inputs explain."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from torchq.runtimes.amplified import too_different


def steep(feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return a smooth result, and one that small changes of the input turn over."""
    x = feeds["x"]
    return [2 * x, torch.sin(1e5 * x.double())]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_only_what_the_inputs_do_not_explain_is_too_different(dtype: torch.dtype) -> None:
    seen = []

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        seen.append({name: value.dtype for name, value in feeds.items()})
        return steep(feeds)

    feeds = {"x": torch.linspace(1, 2, 100).to(dtype), "words": torch.arange(3)}
    expected = steep(feeds)
    found = [expected[0] * 1.5, -expected[1]]
    assert too_different(found, expected, run, feeds) == [0]
    assert seen == [{"x": dtype, "words": torch.int64}] * len(seen) != []


def test_equal_results_are_not_compared_with_others() -> None:
    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        raise AssertionError("never reached")

    infinite = torch.tensor([torch.inf, torch.nan, 1.0])
    assert too_different([infinite], [infinite.clone()], run, {}) == []


def test_another_shape_is_too_different() -> None:
    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        return [torch.zeros(2)]

    assert too_different([torch.zeros(3)], [torch.zeros(2)], run, {"x": torch.ones(1)}) == [0]
