"""Algorithms on two gloo ranks, against one process with the data of both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ptq.ranks import batches, results
from tests.rank_processes import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(Path(__file__).with_name("ranks.py"), folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


NAMES = ["smooth_", "correct_bias_", "gptq_", "adaround_"]


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_has_the_same_result(
    found: list[dict[str, dict[str, torch.Tensor]]], name: str
) -> None:
    one, other = (result[name] for result in found)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("name", NAMES[:3])
def test_the_result_is_that_of_one_process(
    found: list[dict[str, dict[str, torch.Tensor]]], name: str
) -> None:
    expected = results([*batches(0), *batches(1)], None)[name]
    for key, value in found[0][name].items():
        # Sums of the ranks are added in another order.
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6, msg=key)
