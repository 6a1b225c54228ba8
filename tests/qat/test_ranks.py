"""Training on two gloo ranks with different data: DistributedDataParallel and FSDP2."""

from typing import Any

import pytest
import torch

from tests.qat import ranks
from tests.rank_processes import needs_gloo, run_ranks

pytestmark = needs_gloo

Results = list[dict[str, Any]]

CASES = ["ddp fixed", "ddp learned", "fsdp fixed"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(ranks.main, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_agree_on_everything_after_training(results: Results, case: str) -> None:
    first, second = (result[case] for result in results)
    assert first.keys() == second.keys()
    assert len(first) > 0
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("case", CASES)
def test_weights_move_and_only_learned_ranges_do(results: Results, case: str) -> None:
    before = results[0][f"{case} before"]
    after = results[0][case]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"stem.weight", "body.weight", "head.weight"} <= moved
    ranges = {name for name in before if name.endswith("amax")}
    assert len(ranges) == 6
    assert (
        (moved & ranges == ranges) if case.endswith("learned") else not moved & ranges
    )
