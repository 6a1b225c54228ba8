"""Statistics of 2 and 3 gloo ranks against one process that saw the data of all ranks in order."""

from typing import Any

import pytest
import torch

from tests.calib.ranks import amaxes, feed, make_all, run
from tests.rank_processes import needs_gloo, run_ranks
from torchq.calib import Calibrator, sync
from torchq.errors import CalibrationError

pytestmark = needs_gloo

Results = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[2, 3])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Return the results of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, folder, request.param)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)]


def single_process(world: int, repeats: int) -> list[torch.Tensor | None]:
    calibrators = make_all()
    for rank in range(world):
        feed(calibrators, rank, repeats)
    return amaxes(calibrators)


@pytest.mark.parametrize(
    ("name", "repeats"),
    [("small", 1), ("large", 20)],
)
def test_every_rank_has_the_bits_of_one_process(
    results: Results, name: str, repeats: int
) -> None:
    expected = single_process(len(results), repeats)
    assert expected[-1] is None
    for actual in results:
        assert len(actual[name]) == len(expected)
        for mine, one in zip(actual[name], expected, strict=True):
            assert (mine is None) == (one is None)
            assert one is None or torch.equal(mine, one)


def test_batches_of_all_ranks_are_counted(results: Results) -> None:
    total = sum(3 - rank % 2 for rank in range(len(results)))
    for actual in results:
        assert actual["small batches"] == [total] * (len(actual["small"]) - 4) + [
            2,
            2,
            2,
            0,
        ]


def test_negative_values_of_all_ranks_are_counted(results: Results) -> None:
    """The first calibrator counts them on all ranks; of the other, only rank 1 has data."""
    total = sum(3 - rank % 2 for rank in range(len(results)))
    for actual in results:
        negative = actual["small negative"]
        assert (negative[0], negative[-4]) == (total, 2)
        assert not any(negative[1:-4])
        assert not any(negative[-3:])


def test_traffic_is_the_same_on_every_rank_and_for_any_amount_of_data(
    results: Results,
) -> None:
    for actual in results:
        assert (
            actual["large traffic"]
            == actual["small traffic"]
            == results[0]["small traffic"]
        )


def test_sync_inside_inference_mode_leaves_normal_tensors(results: Results) -> None:
    for actual in results:
        assert actual["inference"].item() == len(results)
        assert not actual["inference"].is_inference()


def test_non_finite_data_of_one_rank_is_an_error_on_all(results: Results) -> None:
    for actual in results:
        assert (
            f"got NaN or infinite values in 1 of {len(results)} batches"
            in actual["nan"]
        )


def test_different_shapes_are_an_error_on_all(results: Results) -> None:
    for rank, actual in enumerate(results):
        assert (
            "sync: layer1 has amax shapes that differ between ranks "
            f"(({2 + rank}, 1) on rank {rank}); expected one shape" in actual["shape"]
        )


def test_different_calibrators_are_an_error_on_all(results: Results) -> None:
    for rank, actual in enumerate(results):
        assert (
            f"sync: got 1 calibrators on rank {rank} that differ from another rank's (1 to 1)"
            in actual["kind"]
        )
        assert (
            f"sync: got {1 + rank} calibrators on rank {rank} that differ from another rank's "
            f"(1 to {len(results)})" in actual["number"]
        )


def test_a_rank_that_stays_away_is_an_error_and_no_hang(results: Results) -> None:
    for rank, actual in enumerate(results[:-1]):
        assert (
            f"sync: rank {rank} of {len(results)} got no answer from the others "
            "within the timeout of 1 s" in actual["absent"]
        )
        # Generous for a busy machine; without the time limit gloo waits for 30 minutes.
        assert actual["waited"] < 60


def test_without_a_process_group_there_is_an_error() -> None:
    message = r"sync: got no process group; expected one\. Start with torchrun"
    with pytest.raises(CalibrationError, match=message):
        sync([Calibrator()])
