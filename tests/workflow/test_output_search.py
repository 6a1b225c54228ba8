"""Weight ranges by the error of the output of the layer."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.workflow.layer_matrices import input_matrix
from torchq.workflow.output_search import WEIGHT_FRACTIONS, search_weight_amax


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Flatten(),
        nn.Linear(128, 4),
    ).eval()


def batches() -> list[Tensor]:
    """Return few images, so that all of them are samples, with some large values."""
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x[0, 1, 2, 3] = 30.0
    return [x]


# Weights are drawn in the test, from its seed: of others two candidates may be equally good.
LAYERS = [
    (partial(nn.Linear, 8, 3), {"axis": 0}, (5, 8)),
    (partial(nn.Linear, 8, 3), {}, (5, 8)),
    (partial(nn.Linear, 8, 3), {"block_size": 3}, (5, 8)),
    (partial(nn.Conv2d, 8, 4, 3, groups=2), {"axis": 0}, (2, 8, 5, 5)),
    (partial(nn.Conv2d, 8, 4, 2), {"block_size": 4, "block_axis": 1}, (2, 8, 5, 5)),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("make", "granularity", "shape"), LAYERS)
def test_ranges_have_the_least_error_of_the_output(
    make: Callable[[], Any], granularity: dict[str, int], shape: tuple[int, ...]
) -> None:
    """Each range is the best of all candidates with the rest of the weight unrounded."""
    layer = make()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
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


def test_weights_by_activation_have_less_error_than_other_methods() -> None:
    errors = {}
    for method in ("max", "mse", "activation"):
        model = simulated(
            net(),
            batches(),
            torchq.recipes.integer(3, None, weight_method=method),
            correct=False,
        )
        with torch.no_grad():
            x = batches()[0]
            errors[method] = (model[0](x) - net()[0](x)).square().sum().item()
    assert errors["activation"] < 0.9 * min(errors["max"], errors["mse"])


def test_recipes_of_few_bits_search_and_others_do_not() -> None:
    for bits, searched in ((4, True), (8, False)):
        models = []
        for weights in (None, "activation" if searched else "max"):
            model = simulated(
                net(), batches(), torchq.recipes.integer(bits, 8, weight_method=weights)
            )
            models.append(model.state_dict())
        assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())


def test_without_batches_weights_take_their_largest_magnitude() -> None:
    models = []
    for weights in ("max", "activation"):
        model = net()
        torchq.quantize_(model, torchq.recipes.integer(4, None, weight_method=weights))
        torchq.calibrate(model)
        models.append(model.state_dict())
    assert all(torch.equal(t, models[1][name]) for name, t in models[0].items())
