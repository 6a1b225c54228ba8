"""The search for the weight range that changes the output of a layer least.

References: Lin et al., AWQ: Activation-aware Weight Quantization (MLSys 2024), section 3.2 and the
clipping search of the authors' code.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.formats import Granularity, PerAxis, PerBlock, PerTensor
from torchq.functional import fake_quantize, reduce_amax
from torchq.graph.operators import LAYERS
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import watching
from torchq.workflow.layer_matrices import (
    input_matrix,
    weight_from_matrix,
    weight_matrix,
)

#: The largest magnitude times these is tried; of equal errors the first wins.
WEIGHT_FRACTIONS = tuple(1 - i / 40 for i in range(33))
# Calls whose inputs are kept, and what is kept of each call.
_CALLS, _COLUMNS, _IMAGES = 8, 64, 2


class OutputSamples:
    """Inputs of the Linear and Conv layers in a run, (groups, inputs, samples) by id of a layer."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[int, Tensor] = {}
        self._calls: dict[int, int] = {}
        self._watched = [
            m
            for m in model.modules()
            if isinstance(m, LAYERS) and isinstance(m, QuantModule)
        ]

    def watches(self, layer: nn.Module) -> bool:
        """Return True for a Linear or Conv layer."""
        return any(layer is m for m in self._watched)

    def recording(self) -> AbstractContextManager[None]:
        """Return a context in which calls of the layers keep their inputs."""
        watched = (
            (layer, partial(self._keep_matrix, layer)) for layer in self._watched
        )
        return watching(watched, before=True)

    def _keep_matrix(self, layer: Any, args: Any, kwargs: Any, _: None) -> None:
        self._calls[id(layer)] = self._calls.get(id(layer), 0) + 1
        if self._calls[id(layer)] > _CALLS:
            return
        x = (args[0] if args else kwargs["input"]).detach()
        if isinstance(layer, nn.Linear):
            x = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
            x = _spread_out(x, 0, _COLUMNS)
        elif x.dim() == layer.weight.dim():
            x = x[:_IMAGES]
        scale = getattr(layer.input_quantizer, "pre_quant_scale", None)
        columns = input_matrix(
            layer, x if scale is None else x * scale.to(x.dtype)
        ).float()
        columns = _spread_out(columns, 2, _COLUMNS).clone()
        old = self.layers.get(id(layer))
        self.layers[id(layer)] = (
            columns if old is None else torch.cat([old, columns], dim=2)
        )


def _spread_out(x: Tensor, dim: int, count: int) -> Tensor:
    """Return at most ``count`` slices of ``x``, evenly spread."""
    size = x.shape[dim]
    if size <= count:
        return x
    return x.index_select(dim, torch.arange(count, device=x.device) * size // count)


def set_range_by_output(
    layer: Any,
    quantizer: TensorQuantizer,
    samples: OutputSamples | None,
    group: dist.ProcessGroup | None,
) -> bool:
    """Set the range of a weight by the error of the layer's output; return whether it was."""
    if (
        samples is None
        or not samples.watches(layer)
        or not quantizer.descriptor.symmetric
    ):
        return False
    x = samples.layers.get(id(layer))
    if x is None:
        if group is None:
            return False
        matrix = weight_matrix(layer, layer.weight)
        x = matrix.new_zeros(matrix.shape[0], matrix.shape[2], 0)
    quantizer.set_amax(search_weight_amax(layer, x, group))
    return True


def search_weight_amax(
    layer: Any, x: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Return the weight range of least squared error of the output, summed over all processes.

    Every group of the weight takes its own fraction of its largest magnitude, by the error of its
    part of the product. ``x`` is (groups, inputs, samples).
    """
    quantizer: TensorQuantizer = layer.weight_quantizer
    d = quantizer.descriptor
    weight = layer.weight.detach().float()
    largest = reduce_amax(weight, d.granularity)
    loss = _loss(layer, x.float(), d.granularity)
    best = torch.ones_like(largest)
    least = torch.full_like(largest, torch.inf)
    for fraction in WEIGHT_FRACTIONS:
        amax = largest * fraction
        rounded = fake_quantize(
            weight, amax, d.format, d.granularity, d.block_scale_format
        )
        error = loss(rounded - weight).view(largest.shape)
        if group is not None:
            dist.all_reduce(error, group=group)
        best = torch.where(error < least, fraction, best)
        least = torch.minimum(error, least)
    return largest * best


def _loss(
    layer: Any, x: Tensor, granularity: Granularity
) -> Callable[[Tensor], Tensor]:
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
        layer,
        x.square().mean(2).unsqueeze(1).expand_as(weight_matrix(layer, layer.weight)),
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


def _loss_of_blocks(
    layer: Any, x: Tensor, granularity: PerBlock
) -> Callable[[Tensor], Tensor]:
    """Return ``d H d^T`` of each block d, where H holds the second moments of its inputs."""
    kernel = layer.weight.shape[2:]
    samples = x[0].view(layer.weight.shape[1], *kernel, -1).movedim(0, -2)
    # (kernel, blocks, size, samples).
    blocks = PerBlock(granularity.size, -2).split(samples)
    moments = blocks @ blocks.mT

    def of_blocks(difference: Tensor) -> Tensor:
        rows = PerBlock(granularity.size, -1).split(difference.movedim(1, -1))
        error = torch.einsum("o...s,...st->o...t", rows, moments).mul_(rows).sum(-1)
        return error.movedim(-1, 1)  # (out, blocks, kernel)

    return of_blocks
