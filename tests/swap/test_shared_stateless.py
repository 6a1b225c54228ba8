"""One activation object for all layers: each place gets a range of its own.

Objects that the model does not own are left alone.
"""

import torch
from torch import nn

import torchq
from torchq.nn import QuantSiLU

X = torch.linspace(-2, 2, 48).reshape(1, 3, 4, 4)


class Block(nn.Module):
    default_act = nn.SiLU()  # one object of the class, as in Ultralytics' Conv

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 1)
        self.act = Block.default_act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv(x))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(3), nn.Sequential(Block(3), nn.Flatten(), nn.Linear(48, 2))).eval()


def test_each_place_gets_a_range_and_the_shared_object_stays_float() -> None:
    model, other = net(), net()
    report = torchq.quantize_(model, target="onnxruntime")
    assert [d.name for d in report.replaced if d.class_name == "SiLU"] == ["0.act", "1.0.act"]
    first, second = model[0].act, model[1][0].act
    assert isinstance(first, QuantSiLU) and isinstance(second, QuantSiLU)
    assert first is not second
    torchq.calibrate(model, [X], progress=False)
    assert first.input_quantizer.amax != second.input_quantizer.amax
    assert type(Block.default_act) is nn.SiLU and other[0].act is Block.default_act
    assert [name for name, _ in first.named_children()] == ["input_quantizer", "gate_quantizer"]
    assert not list(Block.default_act.children())
    with torchq.disabled(model, "*"):
        assert torch.equal(model(X), other(X))


def test_a_shared_parent_is_one_place() -> None:
    block = Block(3)
    block.act = nn.SiLU()
    model = nn.Sequential(block, block)
    torchq.quantize_(model, target="onnxruntime")
    assert model[0] is model[1] is block
    assert isinstance(block.act, QuantSiLU)
