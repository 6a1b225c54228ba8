"""Hooks of containers see what they saw, and forwards that were replaced are not folded through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.common import error, outputs, randomized
from torchq.fusion import fuse_


class Outside(nn.Module):
    """A convolution and a BatchNorm, each in a container of its own."""

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1))
        self.post = nn.Sequential(nn.BatchNorm2d(4))
        self.norm_first = norm_first

    def forward(self, x: Tensor) -> Any:
        return self.body(self.post(x)) if self.norm_first else self.post(self.body(x))


HOOKS_AROUND = {
    "output of the layer's container": (False, "body", "register_forward_hook", True),
    "input of the norm's container": (False, "post", "register_forward_pre_hook", True),
    "output of the norm's container": (False, "post", "register_forward_hook", False),
    "input of the layer's container": (False, "body", "register_forward_pre_hook", False),
    "output of a norm before": (True, "post", "register_forward_hook", True),
    "input of a layer behind": (True, "body", "register_forward_pre_hook", True),
}


@pytest.mark.parametrize("name", HOOKS_AROUND)
@pytest.mark.parametrize("recorded", [False, True])
def test_hooks_of_containers_see_what_they_saw(name: str, recorded: bool) -> None:
    norm_first, path, kind, refused = HOOKS_AROUND[name]
    torch.manual_seed(0)
    model = randomized(Outside(norm_first).double())
    x, seen = torch.randn(2, 4, 5, 5, dtype=torch.float64), []
    getattr(model.get_submodule(path), kind)(lambda *args: seen.append(args[-1]))
    outputs(model, x)
    report = fuse_(model, x if recorded else None)
    seen[1:-1] = []
    outputs(model, x)
    first, last = (
        value[0] if isinstance(value, tuple) else value for value in seen[:: len(seen) - 1]
    )
    assert error(last, first) <= 1e-10
    assert (report.fused == ()) is refused
    if refused:
        assert "hook; remove the hook first" in report.reason("post.0")


def test_a_forward_set_on_the_layer_object_is_not_folded_through() -> None:
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).double())
    original = model[0].forward
    model[0].forward = lambda x: 2 * original(x)
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    want = outputs(model, x)
    for verify in (True, False):
        report = fuse_(model, verify=verify)
        assert "its layer 0 has a forward that was set on the object" in report.reason("1")
    assert torch.equal(outputs(model, x), want)


def test_a_layer_that_cannot_run_on_one_tensor_is_refused() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor, factor: float) -> Tensor:
            return super().forward(x) * factor

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = Scaled(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(self.conv(x, 2.0))

    torch.manual_seed(0)
    report = fuse_(randomized(Calls()))
    assert "folding it into conv cannot be checked (TypeError: " in report.reason("bn")
