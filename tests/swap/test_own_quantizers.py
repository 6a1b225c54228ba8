"""Quantizers that the author of a model has written into it stay as they are, and alone."""

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.nn import TensorQuantizer


class Block(nn.Module):
    """A product behind a quantizer of the author's, named as those of layers are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.residual_quantizer = TensorQuantizer(torchq.QuantDescriptor())
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual_quantizer(self.first(x))
        return self.last(x * torch.sigmoid(x))


@pytest.mark.parametrize("is_root", [True, False])
def test_a_target_chooses_codes_beside_them(is_root: bool) -> None:
    torch.manual_seed(0)
    block = Block().eval()
    model = block if is_root else nn.Sequential(block).eval()
    x = torch.randn(2, 3, 8, 8)
    plan = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert not any(
        "residual_quantizer" in slot for group in plan.shared for slot in group
    )
    assert block.residual_quantizer.descriptor == torchq.QuantDescriptor()
    assert block.quant_mul.input_quantizer.descriptor.unsigned is True  # type: ignore[union-attr]
    torchq.calibrate(model, [x], progress=False)
    assert block.residual_quantizer.calibrated
