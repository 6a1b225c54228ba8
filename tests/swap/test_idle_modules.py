"""Modules that do nothing but in training, as those that drop branches, change no plan."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.graph.flow import Call, record
from torchq.runtime import RUNTIMES
from torchq.swap.passes import does_nothing

X = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class DropsSamples(nn.Module):
    """Sets whole samples to zero in training, under a name that nothing knows."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1, 1, 1) > 0.5)


class Overwrites(nn.Module):
    """Returns its input too, and has changed it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp_(min=0.0)


class Block(nn.Module):
    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        return x + self.behind(self.norm(self.first(x)))


class Net(nn.Module):
    def __init__(self, behind: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(behind()), nn.ReLU(), Block(behind()))
        self.norm = nn.GroupNorm(4, 16)
        self.behind = behind()
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x).relu())
        return self.head(self.behind(self.norm(x)) + x)


def built(behind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return Net(behind).eval()


def slots(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_modules() if name.endswith("_quantizer"))


@pytest.mark.parametrize("target", [None, *sorted(RUNTIMES)])
def test_a_net_that_drops_branches_is_planned_as_the_one_that_does_not(
    target: str | None,
) -> None:
    trained, plain = built(DropsSamples), built(nn.Identity)
    for model in (trained, plain):
        torchq.quantize_(model, target=target, example=X, progress=False)
    assert list(slots(trained)) == list(slots(plain))
    torchq.calibrate(trained, [X], correct=False, progress=False)
    plain.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(plain(X), trained(X))


def test_only_what_computes_nothing_is_idle() -> None:
    for behind, idle in ((DropsSamples, True), (Overwrites, False)):
        calls = record(built(behind), X).calls
        named = [call.idle for call in calls if call.name.endswith("behind")]
        assert named == [idle] * 3, behind
    for call in record(built(nn.ReLU), X).calls:
        assert not call.idle


@pytest.mark.parametrize(
    "module", [torchq.nn.QuantIdentity(), torchq.nn.TensorQuantizer()]
)
def test_a_quantizer_that_is_switched_off_stays_a_quantizer(module: nn.Module) -> None:
    assert not does_nothing(Call(0, "quantizer", module, (), idle=True))
    assert does_nothing(Call(0, "drops", DropsSamples(), (), idle=True))
    assert not does_nothing(Call(0, "overwrites", Overwrites(), ()))
