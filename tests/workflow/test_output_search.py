"""The search for weight ranges by the error of the output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.workflow.layer_matrices import input_matrix
from torchq.workflow.output_search import WEIGHT_FRACTIONS, search_weight_amax

LAYERS = [
    (nn.Linear(8, 3), {"axis": 0}, (5, 8)),
    (nn.Linear(8, 3), {}, (5, 8)),
    (nn.Linear(8, 3), {"block_size": 3}, (5, 8)),
    (nn.Conv2d(8, 4, 3, groups=2), {"axis": 0}, (2, 8, 5, 5)),
    (nn.Conv2d(8, 4, 2), {"block_size": 4, "block_axis": 1}, (2, 8, 5, 5)),
]


@pytest.mark.parametrize(("layer", "granularity", "shape"), LAYERS)
def test_ranges_have_the_least_error_of_the_output(
    layer: Any, granularity: dict[str, int], shape: tuple[int, ...]
) -> None:
    """Each range is the best of all candidates with the rest of the weight unrounded."""
    layer, x = copy.deepcopy(layer), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    d = torchq.QuantDescriptor(3, **granularity)  # type: ignore[arg-type]
    torchq.quantize_(layer, torchq.QuantConfig((torchq.Rule("*", weight=d),)))
    with torch.no_grad():
        amax = search_weight_amax(layer, input_matrix(layer, x))
        weight = layer.weight.clone()
        with torchq.disabled(layer):
            expected = layer(x)
        layer.weight_quantizer.set_amax(amax)
        largest = layer.weight_quantizer.descriptor.granularity.amax(weight)
        found = torch.full_like(amax, torch.nan)
        for index in range(amax.numel()):
            errors = []
            for fraction in WEIGHT_FRACTIONS:
                trial = amax.clone()
                trial.view(-1)[index] = largest.reshape(-1)[index] * fraction
                layer.weight_quantizer.set_amax(trial)
                mixed = torch.where(
                    _group(d, weight, index), layer.weight_quantizer(weight), weight
                )
                layer.weight_quantizer.mode = "off"
                layer.weight.copy_(mixed)
                errors.append((layer(x) - expected).square().sum().item())
                layer.weight.copy_(weight)
                layer.weight_quantizer.mode = "quantize"
            best = WEIGHT_FRACTIONS[errors.index(min(errors))]
            found.view(-1)[index] = largest.reshape(-1)[index] * best
    torch.testing.assert_close(amax, found)


def _group(d: torchq.QuantDescriptor, weight: Tensor, index: int) -> Tensor:
    """Return which elements of a weight belong to one range."""
    shape = d.granularity.amax_shape(weight.shape)
    chosen = torch.zeros(shape)
    chosen.view(-1)[index] = 1
    parts = d.granularity.split(weight)
    aligned = d.granularity.align(chosen, weight.shape).expand_as(parts)
    return d.granularity.join(aligned, weight.shape) > 0
