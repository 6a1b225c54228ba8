"""What fuse_ shows: a report as wide as the terminal, and progress where it takes long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq.fusion.passes
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import randomized
from torchq.errors import ConfigError
from torchq.fusion import fuse_


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), RepVGGBlock(8, 8), nn.ReLU())
    return randomized(nn.Sequential(*layers, nn.BatchNorm2d(8)))


def test_reports_are_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    model = net()
    report = fuse_(model)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 60
    reason = report.reason("4")
    assert reason is not None
    assert " ".join(reason.split()) in " ".join(text.split())


@pytest.mark.parametrize("enabled", [True, False])
def test_each_pass_shows_progress(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int]] = []

    def bar(items: Sequence[Any], **options: Any) -> Iterator[Any]:
        assert options["enabled"] is enabled
        shown.append((options["description"], len(items)))
        yield from items

    monkeypatch.setattr(torchq.fusion.passes, "progress_bar", bar)
    fuse_(net(), progress=enabled)
    modules = len(list(net().modules()))
    assert shown[0] == ("merge blocks", modules)
    assert {description for description, _ in shown} == {
        "merge blocks",
        "fold BatchNorm",
    }


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        out = self.bn(self.conv(x)) + shift
        assert isinstance(out, Tensor)
        return out


class Optional(TwoInputs):
    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:  # type: ignore[override]
        out = self.bn(self.conv(x)) + shift
        assert isinstance(out, Tensor)
        return out


def test_a_batch_with_labels_is_an_example() -> None:
    """As a loader yields it: the label is no argument, and the second input of a model is one."""
    x, labels, shift = torch.randn(2, 3, 4, 4), torch.tensor([0, 1]), torch.ones(4, 1, 1)
    assert fuse_(net(), (torch.randn(2, 3, 8, 8), labels)).applied
    for example in ((x, shift), [x, shift, labels], {"x": x, "shift": shift}):
        torch.manual_seed(0)
        report = fuse_(randomized(TwoInputs()), example)
        assert report.applied
        assert report.error is not None
    with pytest.raises(ConfigError, match="an optional argument and a label look the same"):
        fuse_(randomized(Optional()), (x, labels))
