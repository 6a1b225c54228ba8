"""Each pass of fuse_ alone, on a small model, and the order in which they run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.blocks.unknown import PlainSum
from tests.fusion.common import error, norms, outputs, randomized
from torchq.fusion.passes import (
    FIRST,
    REPEATED,
    Pass,
    Trial,
    fold_batchnorms,
    merge_known_blocks,
    merge_unknown_blocks,
    run_passes,
)


def trial(*layers: nn.Module) -> Trial:
    torch.manual_seed(0)
    return Trial(randomized(nn.Sequential(*layers).double()))


def image() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, 9, 9, dtype=torch.float64, generator=generator)


def test_known_blocks_become_their_deployed_form_and_nothing_else_changes() -> None:
    work = trial(RepVGGBlock(4, 4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    want = outputs(work.model, image())
    assert merge_known_blocks(work) == 1
    assert [edit.record()["kind"] for edit in work.edits] == ["block"]
    assert sorted(name for name, _ in work.model[0].named_parameters()) == [
        "rbr_reparam.bias",
        "rbr_reparam.weight",
    ]
    assert len(norms(work.model)) == 1
    assert error(outputs(work.model, image()), want) <= 1e-10
    assert merge_known_blocks(work) == 0


def test_an_addition_of_branches_becomes_one_layer_inside_its_module() -> None:
    work = trial(PlainSum(4, 4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    want = outputs(work.model, image())
    assert merge_unknown_blocks(work) == 1
    assert [edit.record()["kind"] for edit in work.edits] == ["addition"]
    assert [type(child) for child in work.model[0].children()] == [nn.Conv2d, nn.Hardswish]
    assert len(norms(work.model)) == 1
    assert error(outputs(work.model, image()), want) <= 1e-10


def test_batchnorms_are_folded_and_branches_stay() -> None:
    work = trial(RepVGGBlock(4, 4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    want = outputs(work.model, image())
    assert fold_batchnorms(work) == 3
    assert {edit.record()["kind"] for edit in work.edits} == {"batchnorm"}
    assert hasattr(work.model[0], "rbr_dense")
    assert list(work.refused) == ["0.rbr_identity"]
    assert error(outputs(work.model, image()), want) <= 1e-10


def counting(results: list[int], log: list[str], name: str) -> Pass:
    def run(work: Trial) -> int:
        log.append(name)
        return results.pop(0) if results else 0

    return run


@pytest.mark.parametrize(
    ("folds", "merges", "order"),
    [
        ([], [], "a b f"),
        ([1], [], "a b f f b"),
        ([1, 0, 1], [0, 1], "a b f f b b f f b"),
    ],
)
def test_repeated_passes_take_turns_until_one_finds_nothing(
    folds: list[int], merges: list[int], order: str
) -> None:
    log: list[str] = []
    fold, merge = counting(folds, log, "f"), counting(merges, log, "b")
    run_passes(trial(), (counting([], log, "a"), merge), (fold, merge))
    assert log == order.split()


def test_the_order_is_stated_in_one_place() -> None:
    first = [step.__name__ for step in FIRST]
    repeated = [step.__name__ for step in REPEATED]
    assert first == ["merge_known_blocks", "merge_unknown_blocks"]
    assert repeated == ["fold_batchnorms", "merge_unknown_blocks"]
