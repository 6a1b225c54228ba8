"""Scenarios of calibration.

S10 to S12 and S16 are in tests/calib and tests/workflow/test_calibrate_ranks.py.
"""

import math

import pytest
import torch
from torch import nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.errors import CalibrationError
from torchq.workflow import quantizers


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_s13_poisoned_batch_is_named_and_the_others_are_intact(value: float) -> None:
    """The head alone sees the bad number, because a hook puts it there."""
    data = image_batches(3)
    clean = ConvNet()
    model = ConvNet()
    model.load_state_dict(clean.state_dict())
    calls = []

    def poison(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        calls.append(1)
        return (
            args[0].clone().index_fill_(0, torch.tensor([0]), value)
            if len(calls) == 2
            else args[0],
        )

    for net in (clean, model):
        torchq.quantize_(net)
    torchq.calibrate(clean, data, progress=False)
    model.head.register_forward_pre_hook(poison)
    message = r"head.input_quantizer: .*NaN or infinite values in 1 of 3 batches"
    with pytest.raises(CalibrationError, match=message) as caught:
        torchq.calibrate(model, data, progress=False)
    assert "stem" not in str(caught.value)
    expected = quantizers(clean)
    for name, q in quantizers(model).items():
        if name == "head.input_quantizer":
            assert not q.calibrated
        else:
            assert torch.equal(q.amax, expected[name].amax), name


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("recipe", torchq.recipes.RECIPES)
def test_s14_dead_channel_dead_activation_and_tiny_channel(
    recipe: str, dtype: torch.dtype
) -> None:
    layer = nn.Linear(32, 4, bias=False)
    with torch.no_grad():
        layer.weight[1] = 0.0
        layer.weight[2] = torch.linspace(-1e-6, 1e-6, 32)
    model = nn.Sequential(layer).to(dtype)
    torchq.quantize_(model, torchq.recipes.by_name(recipe))
    for x in (torch.randn(8, 32, dtype=dtype), torch.zeros(8, 32, dtype=dtype)):
        torchq.calibrate(model, [x], progress=False, force=True)
        y = model(x.requires_grad_())
        y.square().sum().backward()
        assert bool(y.isfinite().all())
        assert bool((y[:, 1] == 0).all())
        for tensor in (x.grad, layer.weight.grad):
            assert tensor is not None
            assert bool(tensor.isfinite().all())
        for q in quantizers(model).values():
            if q.calibrated:
                assert bool((q.scale > 0).all())
                assert bool(q.scale.isfinite().all())


def test_s15_calibrated_in_inference_mode_then_trained() -> None:
    for recipe in (torchq.recipes.int8(), torchq.recipes.w4a4()):
        model = ConvNet()
        torchq.quantize_(model, recipe)
        with torch.inference_mode():
            torchq.calibrate(model, image_batches(), progress=False)
        assert not any(
            t.is_inference() for t in (*model.parameters(), *model.buffers())
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(image_batches()[0]).square().sum().backward()
        optimizer.step()
        assert bool(model.head.weight.isfinite().all())
