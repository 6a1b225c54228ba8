"""Scenarios of swapping."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Conv2d, Linear

import torchq
from tests.models import Parts, SamePadConv2d, image_batches
from torchq import TensorQuantizer
from torchq.nn import QuantLinear


def test_s04_optimizer_built_before_swap() -> None:
    conv = Conv2d(3, 4, 3)
    frozen = Conv2d(4, 4, 3).bfloat16()
    frozen.weight.requires_grad_(False)
    frozen.i = 3
    frozen.f = -1
    model = nn.Sequential(conv, frozen).eval()
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.1
    )
    calls: list[str] = []
    for layer in model:
        layer.register_forward_pre_hook(lambda m, a: calls.append("pre"))
        layer.register_forward_hook(lambda m, a, y: calls.append("post"))
    conv.register_full_backward_hook(lambda m, i, o: calls.append("backward"))
    ids = [id(p) for p in model.parameters()]
    before = conv.weight.detach().clone()
    torchq.quantize_(model)
    assert [id(p) for p in model.parameters()] == ids
    y = frozen(conv(image_batches()[0].requires_grad_()).bfloat16())
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    optimizer.step()
    assert not torch.equal(conv.weight, before)
    assert calls == ["pre", "post", "pre", "post", "backward"]
    assert (
        frozen.i,
        frozen.f,
        frozen.weight.requires_grad,
        frozen.weight.dtype,
        frozen.training,
    ) == (3, -1, False, torch.bfloat16, False)
    assert not any(m.training for m in model.modules())


def test_s05_shared_module_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = Linear(4, 4)
            self.alias = self.shared
            self.l1 = Linear(4, 4)
            self.l2 = Linear(4, 4)
            self.l2.weight = self.l1.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.l2(self.l1(self.alias(self.shared(x))))

    model = Tied()
    plain = model.state_dict()
    report = torchq.quantize_(model)
    assert model.shared is model.alias
    assert type(model.shared) is QuantLinear
    assert [d.names for d in report.replaced] == [("shared", "alias"), ("l1",), ("l2",)]
    assert model.l1.weight is model.l2.weight
    x = torch.randn(3, 4)
    torchq.calibrate(model, [x], progress=False)
    assert torch.equal(model.l1.weight_quantizer.amax, model.l2.weight_quantizer.amax)
    twin = Tied()
    torchq.quantize_(twin)
    twin.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(twin(x), model(x))
    assert twin.l1.weight is twin.l2.weight
    twin.load_state_dict(plain, strict=True)  # a float checkpoint too


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_s06_subclass_weight_norm_and_attention() -> None:
    """Each is quantized, with an effect, or reported; never silently float."""
    x = torch.randn(2, 3, 8, 8)
    normed = nn.utils.weight_norm(Conv2d(3, 3, 3))
    model = nn.Sequential(SamePadConv2d(3, 3, 3), normed)
    (without_example,) = torchq.plan(model).skipped
    assert without_example.name == "0"
    assert "example" in without_example.reason
    report = torchq.quantize_(model, example=x)
    assert report.skipped == ()
    assert [(d.name, bool(d.calls)) for d in report.replaced] == [
        ("0", True),
        ("1", False),
    ]
    quantized = model(x)
    for name in ("0", "1"):
        with torchq.disabled(model, name):
            assert not torch.equal(model(x), quantized), name

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    tokens = torch.randn(2, 5, 8)
    report = torchq.quantize_(layer)
    assert {d.name for d in report.replaced} == {"linear1", "linear2", "self_attn", ""}
    assert report.skipped == ()
    with torch.no_grad():
        quantized = layer(tokens)
        for name in ("linear1", "linear2", "self_attn"):
            with torchq.disabled(layer, name):
                assert not torch.equal(layer(tokens), quantized), name


def test_s08_control_flow_and_structured_data() -> None:
    class Wild(Parts):
        def forward(
            self, inputs: list[Tensor], options: dict[str, Any] | None = None
        ) -> dict[str, Any]:
            x = torch.cat(inputs)
            y = self.large(x) if x.abs().max() > 1 else self.small(x)
            return {"out": y, "parts": list(y.unbind(0)), "options": options}

    model = Wild(
        small=Linear(4, 4),
        large=Linear(4, 4),
    )
    torchq.quantize_(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [[torch.full((2, 4), 0.5)], [torch.full((2, 4), 3.0), torch.ones(1, 4)]]
    torchq.calibrate(
        model, data, forward=lambda m, batch: m(batch, {"a": 1}), progress=False
    )
    assert all(q.calibrated for q in model.modules() if isinstance(q, TensorQuantizer))
    before = model.large.weight.detach().clone()
    model(data[1])["out"].square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.large.weight, before)
