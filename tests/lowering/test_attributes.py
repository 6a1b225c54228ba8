"""What code around a layer may read of it survives the replacement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import Int8Conv, Int8Linear


class Patches(nn.Module):
    """Casts its input to the dtype of a weight, as the patch embeddings of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, 8, 4, stride=4)
        self.projection.f = -1  # type: ignore[assignment]
        self.head = nn.Linear(8, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.shape[1] != 3:
            raise ValueError("expected three channels")
        x = self.projection(pixels.to(self.projection.weight.dtype)).flatten(2).mean(-1)
        return self.head(x.view(-1, self.head.in_features))


X = torch.linspace(-1, 2, 4 * 3 * 64).reshape(4, 3, 8, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_code_that_reads_the_weight_sees_floating_point(dtype: torch.dtype) -> None:
    x = X.to(dtype)
    model = calibrated(Patches().to(dtype), x)
    int8 = torchq.deploy(model, x)
    layer = int8.projection
    assert isinstance(layer, Int8Conv) and isinstance(int8.head, Int8Linear)
    assert layer.weight.dtype is dtype and layer.weight_codes.dtype is torch.int8
    # Equal but for the rounding of code * scale to the dtype, which the simulation does once too.
    assert torch.equal(layer.weight, model.projection.weight_quantizer(model.projection.weight))
    assert sqnr(int8(x).float(), model(x).float()) > (
        40 if dtype is torch.float32 else 30
    )  # bf16 itself rounds to 8 bits


def test_plain_attributes_stay() -> None:
    int8 = torchq.deploy(calibrated(Patches(), X), X)
    assert (int8.projection.f, int8.projection.kernel_size, int8.head.in_features) == (
        -1,
        (4, 4),
        8,
    )


def test_other_linear_kinds_have_a_weight_too() -> None:
    x = torch.randn(4, 64)
    model = nn.Sequential(nn.Linear(64, 32))
    rule = torchq.Rule(
        "*",
        input=torchq.QuantDescriptor(8, dynamic=True, axis=0),
        weight=torchq.QuantDescriptor(8, axis=0),
    )
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x)
    assert not isinstance(int8[0], nn.Linear)
    assert torch.equal(int8[0].weight, model[0].weight_quantizer(model[0].weight))


def test_a_layer_with_a_hook_keeps_it_and_simulates() -> None:
    seen = []
    model = calibrated(Patches(), X)
    model.head.register_forward_hook(lambda *_: seen.append(1))
    int8 = torchq.deploy(model)
    int8(X)
    assert seen == [1]
    assert isinstance(int8.projection, Int8Conv) and isinstance(int8.head, torchq.nn.QuantLinear)
    assert "it has a forward hook" in str(torchq.summary(int8))
