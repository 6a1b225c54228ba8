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
    return [m for m in model.modules() if isinstance(m, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))]
