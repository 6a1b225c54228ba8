"""Convolutions and linear layers as matrices: what an output channel reads, and how often.

A layer computes ``weight @ input + bias`` for every sample, where a sample is one row of a batch
for Linear and one output pixel for a convolution. Groups of a convolution are separate matrices.
"""

from itertools import product
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.graph.operators import TRANSPOSED


def _groups(layer: object) -> int:
    return int(getattr(layer, "groups", 1))


def weight_matrix(layer: object, weight: Tensor) -> Tensor:
    """Return ``weight`` as (groups, outputs of a group, inputs of a group)."""
    return weight.reshape(_groups(layer), -1, weight[0].numel())


def weight_from_matrix(layer: Any, matrix: Tensor) -> Tensor:
    """Undo :func:`weight_matrix`."""
    return matrix.reshape(layer.weight.shape)


def output_matrix(layer: Any, out: Tensor) -> Tensor:
    """Return an output of ``layer`` as (groups, outputs of a group, samples)."""
    axis = -1 if isinstance(layer, nn.Linear) else out.dim() - layer.weight.dim() + 1
    return out.movedim(axis, 0).reshape(
        _groups(layer), layer.weight.shape[0] // _groups(layer), -1
    )


def input_matrix(layer: Any, x: Tensor) -> Tensor:
    """Return an input of ``layer`` as (groups, inputs of a group, samples), as its weight."""
    if isinstance(layer, nn.Linear):
        return x.flatten(0, -2).t().unsqueeze(0) if x.dim() > 1 else x.view(1, -1, 1)
    if x.dim() < layer.weight.dim():
        x = x.unsqueeze(0)
    x = _padded(layer, x).transpose(0, 1)  # (channels, images, pixels)
    kernel = layer.kernel_size
    dilation = layer.dilation
    stride = layer.stride
    sizes = [
        (n - d * (k - 1) - 1) // s + 1
        for n, k, d, s in zip(x.shape[2:], kernel, dilation, stride, strict=True)
    ]
    taps = list(product(*(range(k) for k in kernel)))
    out = x.new_empty(x.shape[0], len(taps), x.shape[1], *sizes)
    for i, tap in enumerate(taps):
        window = [
            slice(t * d, t * d + s * (n - 1) + 1, s)
            for t, d, s, n in zip(tap, dilation, stride, sizes, strict=True)
        ]
        index = (slice(None), slice(None), *window)
        out[:, i] = x[index]
    return out.flatten(2).unflatten(0, (layer.groups, -1)).flatten(1, 2)


def _padded(layer: Any, x: Tensor) -> Tensor:
    """Return ``x`` with the padding of a convolution."""
    amounts: list[int] = []
    for i, kernel in enumerate(layer.kernel_size):
        total = layer.dilation[i] * (kernel - 1)
        if layer.padding == "valid":
            before, after = 0, 0
        elif layer.padding == "same":
            before = total // 2
            after = total - total // 2
        else:
            before = layer.padding[i]
            after = layer.padding[i]
        amounts = [before, after, *amounts]  # F.pad begins with the last dimension
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, amounts, mode=mode)


def weight_channels(layer: Any, *, inputs: bool = False) -> Tensor:
    """Return a view of the weight as (groups, output or input channels of a group, ...)."""
    grouped: Tensor = layer.weight.unflatten(0, (_groups(layer), -1))
    inputs_first = isinstance(layer, TRANSPOSED)
    return grouped if inputs == inputs_first else grouped.transpose(1, 2)


def channel_ranges(layer: object, *, inputs: bool = False) -> Tensor:
    """Return the largest magnitude of each output or input channel of the weight, (channels,)."""
    return weight_channels(layer, inputs=inputs).abs().flatten(2).amax(2).flatten()


def spread(largest: Tensor) -> float:
    """Return the largest over the median magnitude of the channels that are not zero."""
    live = largest[largest > 0]
    return (live.max() / live.median()).item() if live.numel() else 1.0
