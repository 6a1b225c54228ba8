"""A call of fuse_ works on a copy first, shows progress, reports, and is undone where it fails."""

import math
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import (
    Net,
    copied,
    fused_exactly,
    image,
    outputs,
    randomized,
    same_state,
)
from tests.fusion.test_record import IMAGE, small
from torchq.errors import ConfigError, FuseError
from torchq.fusion import fuse_, fusion_record
from torchq.fusion.fold import FoldEdit
from torchq.swap import quantize_
from torchq.workflow import calibrate


class Refuses(nn.Module):
    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("one of a kind")


def test_models_that_cannot_be_copied_are_an_error_that_names_the_module() -> None:
    body = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        Refuses(),
    )
    model = nn.Sequential(nn.ReLU(), body).eval()
    message = r"1\.2: got a Refuses that cannot be copied \(one of a kind\); expected one that"
    with pytest.raises(FuseError, match=message):
        fuse_(model)


def test_attributes_that_cannot_be_copied_are_shared_with_the_trial_copy() -> None:
    """A Python module, a lock, a method bound to the module that holds them."""

    class Holds(Net):
        def __init__(self) -> None:
            super().__init__(lambda m, x: m.bn(m.conv(x)).relu() * m.library.pi)
            self.library = math
            self.locks = {"lock": [threading.Lock()]}
            self.forward = self.called

        def called(self, x: Tensor) -> Any:
            return self.run(self, x)

    model = randomized(nn.Sequential(Holds(), RepVGGBlock(4, 4))).double()
    model[1].rbr_dense.conv.backend = math
    x = image()
    report = fused_exactly(model, x, x).require_all()
    assert report.applied
    assert len(report.fused) == 2
    assert model[0].library is math


def interrupted(times: int) -> Callable[..., None]:
    """FoldEdit.apply, interrupted at its n-th call."""
    original = FoldEdit.apply
    calls = [0]

    def apply(self: FoldEdit, model: nn.Module) -> None:
        original(self, model)
        calls[0] += 1
        if calls[0] == times:
            raise KeyboardInterrupt

    return apply


@pytest.mark.parametrize("quantized", [False, True])
def test_an_interrupted_fuse_leaves_the_model_as_it_was(
    quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small()
    if quantized:
        restored = nn.Sequential(model[1], model[2])
        quantize_(restored)
        calibrate(restored, [torch.randn(2, 8, 5, 5)], progress=False)
    modules = list(model.named_modules())
    parameters = list(model.named_parameters())
    state = copied(model)
    # twice on the copy, once on the model: the second of its edits is interrupted half way
    monkeypatch.setattr(FoldEdit, "apply", interrupted(4))
    with pytest.raises(KeyboardInterrupt):
        fuse_(model, IMAGE)
    monkeypatch.undo()
    assert list(model.named_modules()) == modules
    assert all(
        a is b
        for (_, a), (_, b) in zip(parameters, model.named_parameters(), strict=True)
    )
    assert same_state(model, state)
    assert fusion_record(model) == []
    assert len(fuse_(model, IMAGE).fused) == 3


def test_reports_are_wrapped_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    report = fuse_(nn.Sequential(*small(), nn.ReLU(), nn.BatchNorm2d(8)).eval())
    message = str(report)
    reason = report.reason("4")
    assert max(map(len, message.splitlines())) <= 60
    assert reason is not None
    assert " ".join(reason.split()) in " ".join(message.split())


class TwoInputs(Net):
    def forward(self, x: Tensor, shift: Tensor) -> Any:  # type: ignore[override]
        return self.bn(self.conv(x)) + shift


class Optional(Net):
    def forward(self, x: Tensor, shift: float = 0.0) -> Any:
        return self.bn(self.conv(x)) + shift


def test_a_batch_with_labels_is_an_example() -> None:
    """As a loader yields it: the label is no argument, and the second input of a model is one."""
    x = torch.randn(2, 4, 4, 4)
    labels = torch.tensor([0, 1])
    shift = torch.ones(4, 1, 1)
    assert fuse_(small(), (IMAGE, labels)).applied
    for example in (
        (x, shift),
        [x, shift, labels],
        {"x": x, "shift": shift},
    ):
        torch.manual_seed(0)
        report = fuse_(randomized(TwoInputs(outputs)), example)
        assert report.applied
        assert report.error is not None
    with pytest.raises(
        ConfigError, match="an optional argument and a label look the same"
    ):
        fuse_(randomized(Optional(outputs)), (x, labels))
