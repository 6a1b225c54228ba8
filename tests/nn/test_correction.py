"""What calibration adds to the results of a layer: it belongs to the weights it was fitted to."""

import pytest
import torch
from torch import nn

from torchq import QuantDescriptor
from torchq.nn import QuantLinear


def corrected() -> QuantLinear:
    """Return a layer with ranges of 1, whose results are doubled and shifted by 3."""
    torch.manual_seed(0)
    layer = QuantLinear(
        4,
        2,
        input_descriptor=QuantDescriptor(amax=1.0),
        weight_descriptor=QuantDescriptor(amax=1.0),
    )
    layer.correct_output_(
        torch.tensor([2.0, 2.0]),
        torch.tensor([3.0, 3.0]),
    )
    return layer


def float_state(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in layer.named_parameters()}


def test_results_are_multiplied_and_shifted() -> None:
    layer = corrected()
    x = torch.linspace(-1, 1, 8).view(2, 4)
    with_correction = layer(x)
    layer.forget_correction()
    bias = layer.bias
    assert bias is not None
    without = layer(x)
    # The products are doubled, the bias is not.
    torch.testing.assert_close(with_correction, 2 * (without - bias) + bias + 3)


def test_the_same_weights_keep_it() -> None:
    layer = corrected()
    layer.load_state_dict(float_state(layer), strict=False)
    assert layer.is_corrected


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_other_weights_end_it(name: str) -> None:
    layer = corrected()
    state = float_state(layer)
    state[name] += 0.1
    layer.load_state_dict(state, strict=False)
    assert not layer.is_corrected
