"""Helpers of the tests of fusion."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.fusion import FuseReport, fuse_

M = TypeVar("M", bound=nn.Module)


def randomized(model: M, seed: int = 0) -> M:
    """Give BatchNorms numbers as training leaves them, every third scale negative; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(getattr(module, "running_mean", None), torch.Tensor):
            module.running_mean.normal_(0, 0.5, generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            if module.weight is not None:
                with torch.no_grad():
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.weight[::3] *= -1
                    module.bias.normal_(0, 0.5, generator=generator)
    return model.eval()


def outputs(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return model(*args)


def error(got: Any, want: Any) -> float:
    """Largest difference relative to the largest expected value."""
    if isinstance(got, (tuple, list)):
        return max(error(g, w) for g, w in zip(got, want, strict=True))
    return (
        (got.double() - want.double()).abs().max() / want.double().abs().max()
    ).item()


def fused_exactly(
    model: nn.Module, x: Any, *example: Any, **options: Any
) -> FuseReport:
    """Fuse a float64 model, which has to compute the same for ``x`` as before."""
    want = outputs(model, x)
    report = fuse_(model, *example, **options)
    assert error(outputs(model, x), want) <= 1e-10  # rounding alone gives about 1e-14
    return report


def norms(model: nn.Module) -> list[str]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 4, 6, 6)), dtype=torch.float64)


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(state) and all(
        torch.equal(state[name], now[name]) for name in now
    )


class Net(nn.Module):
    """One convolution and one BatchNorm, with a forward given as a function."""

    def __init__(
        self, forward: Callable[[Any, Tensor], Any], channels: int = 4
    ) -> None:
        super().__init__()
        self.run = forward
        self.bn = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.other = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def data_dependent(
    forward: Callable[[Any, Tensor], Any],
) -> Callable[[Any, Tensor], Any]:
    """The same model for a tracer that cannot follow it."""

    def run(m: Any, x: Tensor) -> Any:
        return forward(m, x) if float(x.sum()) < 1e9 else x

    return run
