"""Helpers of the fuse tests."""

import copy

import torch
from torch import nn


def randomized(model, seed=0):
    """Eval mode, with BatchNorm statistics and parameters as training leaves them; every third scale negative."""
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


def outputs(model, *args):
    with torch.no_grad():
        return model(*args)


def error(got, want):
    """Largest difference relative to the largest expected value."""
    if isinstance(got, (tuple, list)):
        return max(error(g, w) for g, w in zip(got, want, strict=True))
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def twin(model):
    return copy.deepcopy(model)


def norms(model):
    return [
        m
        for m in model.modules()
        if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    ]


class Net(nn.Module):
    """One convolution and one BatchNorm, with a forward given as a function."""

    def __init__(self, forward, channels=4):
        super().__init__()
        self.run, self.conv, self.bn = (
            forward,
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.other = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return self.run(self, x)


def data_dependent(forward):
    """The same model for a tracer that cannot follow it."""

    def run(m, x):
        return forward(m, x) if float(x.sum()) < 1e9 else x

    return run
