"""``calibrate(..., group=)`` on two gloo ranks, against one process with the data of both.

The model is plain, under DDP, and under FSDP2.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import torchq
from tests.rank_processes import needs_gloo, run_ranks
from tests.workflow.ranks import METHODS, batches, quantized, ranges, run

pytestmark = needs_gloo

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(run, folder)
    # Reports are objects of torchq.
    paths = [folder / f"rank{rank}.pt" for rank in range(2)]
    return [torch.load(path, weights_only=False) for path in paths]


def one_process(data: list[Tensor], **options: Any) -> dict[str, Tensor]:
    model = quantized()
    torchq.calibrate(model, data, progress=False, **options)
    return ranges(model)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, amax in expected.items():
        assert amax.numel() > 0
        assert torch.equal(found[name], amax), name


@pytest.mark.parametrize("method", METHODS)
def test_every_rank_has_the_ranges_of_one_process(
    results: Results, method: str
) -> None:
    # Rank 0 never runs the branch, and the ranks have different numbers of batches.
    expected = one_process(batches(0) + batches(1), method=method)
    for found in results:
        assert_same_bits(found[method], expected)


def test_the_same_under_ddp(results: Results) -> None:
    expected = one_process(batches(0) + batches(1))
    for found in results:
        assert_same_bits(found["ddp"], expected)


def test_the_same_under_fsdp2_and_training_goes_on(results: Results) -> None:
    expected = one_process([x for found in results for x in found["fsdp data"]])
    for found in results:
        assert_same_bits(found["fsdp ranges"], expected)
        assert math.isfinite(found["fsdp loss"])


def test_a_rank_without_batches_gets_the_ranges_too(results: Results) -> None:
    expected = one_process(batches(1))
    for found in results:
        assert_same_bits(found["no batches"], expected)
        assert_same_bits(found["ddp no batches"], expected)


@pytest.mark.parametrize("case", ["one each", "rank 1 alone"])
def test_all_ranks_leave_the_same_operators_in_float(
    results: Results, case: str
) -> None:
    first, second = (found[f"operators, {case}"] for found in results)
    assert first == second
    assert "quant_add" in first[0]


@pytest.mark.parametrize("case", ["one each", "rank 1 alone"])
def test_all_ranks_choose_the_same_factors(results: Results, case: str) -> None:
    first, second = (found[f"factors, {case}"] for found in results)
    assert first[:2] == second[:2]
    assert_same_bits(first[2], second[2])
    assert "query" in first[0].layers


@pytest.mark.parametrize("case", ["one each", "rank 1 alone"])
def test_all_ranks_average_the_same_ranges(results: Results, case: str) -> None:
    first, second = (found[f"averages, {case}"] for found in results)
    assert first[0] == second[0]
    assert_same_bits(first[1], second[1])
    assert "head.input_quantizer" in first[0].averaged


def test_all_ranks_go_without_a_correction_where_one_reads_once(
    results: Results,
) -> None:
    """The others waited for it in the correction for ever."""
    expected = one_process(batches(0) + batches(1))
    for found in results:
        assert_same_bits(found["one shot"], expected)
        assert any("can be read only once" in text for text in found["one shot warned"])


def test_nan_on_one_rank_is_an_error_on_all_that_names_the_quantizer(
    results: Results,
) -> None:
    for found in results:
        assert (
            "calibrate: stem.input_quantizer, head.input_quantizer: Calibrator: got NaN or "
            "infinite values in 1 of 5 batches" in found["nan"]
        )


def test_unseen_on_all_ranks_is_an_error_on_all(results: Results) -> None:
    for found in results:
        assert "no tensor reached branch.input_quantizer in" in found["unseen"]


def test_without_a_group_each_rank_is_alone_and_says_so(results: Results) -> None:
    for rank, found in enumerate(results):
        expected = one_process(batches(rank), on_unseen="disable")
        for kind in ("alone", "alone on purpose"):
            assert found[kind].keys() == expected.keys()
            assert all(
                torch.equal(found[kind][name], amax) for name, amax in expected.items()
            )
        assert len(found["warned"]) == 1 and not found["not warned"]
        assert found["warned"][0].startswith(
            "calibrate: this is one of 2 processes and uses its own batches alone"
        )
        assert "group=torch.distributed.group.WORLD" in found["warned"][0]
