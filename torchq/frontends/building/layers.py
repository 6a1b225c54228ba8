"""Layers of torch by the number of their dimensions, and their weights from a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from torch import nn

from torchq.frontends.building.graph import Constant, GraphBuilder

Classes = dict[int, type[Any]]

#: By the number of spatial dimensions.
CONVOLUTIONS: Classes = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: Classes = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOLS: dict[str, Classes] = {
    "max": {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d},
    "avg": {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d},
}
GLOBAL_POOLS: dict[str, Classes] = {
    "max": {1: nn.AdaptiveMaxPool1d, 2: nn.AdaptiveMaxPool2d, 3: nn.AdaptiveMaxPool3d},
    "avg": {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d},
}
#: By the number of dimensions.
BATCH_NORMS: Classes = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
INSTANCE_NORMS: Classes = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}

Module = TypeVar("Module", bound=nn.Module)


def filled(
    builder: GraphBuilder, module: Module, weight: Constant, bias: Constant | None = None
) -> Module:
    """Return a module with a weight and a bias of the file."""
    module.weight = builder.parameter(weight)
    if bias is not None:
        module.bias = builder.parameter(bias)
    return module


def convolution(
    builder: GraphBuilder,
    weight: Constant,
    bias: Constant | None,
    window: tuple[Sequence[int], Sequence[int], Sequence[int]],
    groups: int,
    extra: Sequence[int] | None = None,
) -> nn.Module:
    """Return a convolution of a window (stride, padding, dilation).

    It is a transposed one where sizes that are added to the result (``extra``) are given.
    """
    stride, padding, dilation = (tuple(part) for part in window)
    first, second, *kernel = weight.tensor.shape
    spatial, size = len(kernel), tuple(kernel)
    options: dict[str, Any] = {"bias": bias is not None, "groups": groups, "dilation": dilation}
    if extra is None:
        channels, table = (second * groups, first), CONVOLUTIONS
    else:
        channels, table = (first, second * groups), TRANSPOSED
        options["output_padding"] = tuple(extra)
    module = table[spatial](*channels, size, stride, padding, device="meta", **options)
    return filled(builder, module, weight, bias)
