"""Each pass of fuse_ alone, on a small model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import error, norms, outputs, randomized
from torchq.fusion.passes import Trial, fold_batchnorms, merge_known_blocks


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


def test_batchnorms_are_folded_and_branches_stay() -> None:
    work = trial(RepVGGBlock(4, 4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
    want = outputs(work.model, image())
    assert fold_batchnorms(work) == 3
    assert {edit.record()["kind"] for edit in work.edits} == {"batchnorm"}
    assert hasattr(work.model[0], "rbr_dense")
    assert list(work.refused) == ["0.rbr_identity"]
    assert error(outputs(work.model, image()), want) <= 1e-10
