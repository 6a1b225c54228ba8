"""The search for the weight range that changes the output of a layer least.

References: Lin et al., AWQ: Activation-aware Weight Quantization (MLSys 2024), section 3.2 and the
clipping search of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import fake_quantize, reduce_amax
from torchq.nn import TensorQuantizer
from torchq.workflow.layer_matrices import weight_from_matrix, weight_matrix

__all__ = ["WEIGHT_FRACTIONS", "search_weight_amax"]

#: The largest magnitude times these is tried; of equal errors the first wins.
WEIGHT_FRACTIONS = tuple(1 - i / 40 for i in range(33))


def _same(error: Tensor) -> Tensor:
    return error


def search_weight_amax(
    layer: Any,
    x: Tensor,
    *,
    add: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """Return the weight range of least squared error of the layer's output.

    Every group of the weight takes its own fraction of its largest magnitude. Where a group is a
    part of an output channel, it is the error of this part's product that counts.

    Args:
        layer: a Linear or Conv layer whose weight has a symmetric quantizer.
        x: samples of its input, (groups, inputs, samples); see
            :func:`torchq.workflow.layer_matrices.input_matrix`.
        add: from the errors of these samples to those of all, where several processes have some.

    Returns:
        The range, of the shape of the quantizer's amax.
    """
    quantizer: TensorQuantizer = layer.weight_quantizer
    d, weight = quantizer.descriptor, layer.weight.detach().float()
    largest = reduce_amax(weight, d.granularity)
    loss = _loss(layer, x.float(), d.granularity)
    best, least = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for fraction in WEIGHT_FRACTIONS:
        amax = largest * fraction
        rounded = fake_quantize(weight, amax, d.format, d.granularity, d.block_scale_format)
        error = add(loss(rounded - weight).view(largest.shape))
        best = torch.where(error < least, fraction, best)
        least = torch.minimum(error, least)
    return largest * best


def _loss(layer: Any, x: Tensor, granularity: Granularity) -> Callable[[Tensor], Tensor]:
    """Return the function from an error of the weight to the error of the output, per range."""
    if isinstance(granularity, PerTensor) or granularity == PerAxis((0,)):
        whole = isinstance(granularity, PerTensor)

        def of_rows(difference: Tensor) -> Tensor:
            error = (weight_matrix(layer, difference) @ x).square().sum(2).flatten()
            return error.sum() if whole else error

        return of_rows
    if isinstance(granularity, PerBlock) and _runs_along_inputs(layer, granularity):
        return _loss_of_blocks(layer, x, granularity)
    importance = weight_from_matrix(
        layer, x.square().mean(2).unsqueeze(1).expand_as(weight_matrix(layer, layer.weight))
    )

    def of_elements(difference: Tensor) -> Tensor:
        parts = granularity.split(difference.square() * importance)
        dims = granularity.reduce_dims(parts.dim())
        return parts.sum(dims) if dims else parts

    return of_elements


def _runs_along_inputs(layer: Any, granularity: PerBlock) -> bool:
    """Return True for blocks of input channels that all output channels read."""
    is_inputs = granularity.axis % layer.weight.dim() == 1
    return is_inputs and (isinstance(layer, nn.Linear) or layer.groups == 1)


def _loss_of_blocks(layer: Any, x: Tensor, granularity: PerBlock) -> Callable[[Tensor], Tensor]:
    """Return ``d H d^T`` of each block d, where H holds the second moments of its inputs."""
    kernel = layer.weight.shape[2:]
    samples = x[0].view(layer.weight.shape[1], *kernel, -1).movedim(0, -2)
    blocks = PerBlock(granularity.size, -2).split(samples)  # (kernel, blocks, size, samples)
    moments = blocks @ blocks.mT

    def of_blocks(difference: Tensor) -> Tensor:
        rows = PerBlock(granularity.size, -1).split(difference.movedim(1, -1))
        error = torch.einsum("o...s,...st->o...t", rows, moments).mul_(rows).sum(-1)
        return error.movedim(-1, 1)  # (out, blocks, kernel)

    return of_blocks
