"""The gate of a quantized SiLU."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from torchq.nn import QuantSiLU, convert_, revert_

X = torch.linspace(-4, 4, 1001)


def silu() -> QuantSiLU:
    module = convert_(
        nn.SiLU(),
        input=torchq.QuantDescriptor(amax=4.0),
    )
    assert isinstance(module, QuantSiLU)
    return module


def test_the_gate_is_off_until_asked_for() -> None:
    module = silu()
    x = module.input_quantizer(X)
    assert torch.equal(
        module(X),
        torch.nn.functional.silu(x),
    )
    module.gate_quantizer.mode = "quantize"
    codes = torch.clamp(torch.round(torch.sigmoid(x) * 255), 0, 255)
    # Both sides round code / 255 to float32, in another order: a few units in the last place of
    # numbers up to 4.
    torch.testing.assert_close(
        module(X),
        x * codes / 255,
        atol=2e-6,
        rtol=0,
    )
    assert not torch.equal(module(X), torch.nn.functional.silu(x))
    module.gate_quantizer.mode = "off"
    assert torch.equal(
        module(X),
        torch.nn.functional.silu(x),
    )


def test_gradients_pass_through_the_gate() -> None:
    module = silu()
    x = X[1:-1].clone().requires_grad_()
    module.gate_quantizer.mode = "quantize"
    module(x).sum().backward()
    y = module.input_quantizer(x.detach())
    gate = module.gate_quantizer(torch.sigmoid(y))
    slope = torch.sigmoid(y) * (1 - torch.sigmoid(y))
    assert x.grad is not None
    torch.testing.assert_close(x.grad, gate + y * slope)


def test_the_runtime_that_needs_it_switches_it_on(tmp_path: Path) -> None:
    for target, mode in (("onnxruntime", "quantize"), ("openvino", None), (None, None)):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 1)).eval()
        before = copy.deepcopy(model)
        torchq.quantize_(model, target=target)
        assert (
            model[1].gate_quantizer.mode if isinstance(model[1], QuantSiLU) else None
        ) == mode
        if mode is None:
            continue
        x = torch.randn(2, 3, 6, 6)
        torchq.calibrate(model, [x], progress=False)
        torchq.save(model, tmp_path / "model.pt")
        assert torch.equal(
            torchq.load(copy.deepcopy(before), tmp_path / "model.pt")(x), model(x)
        )
        with torchq.disabled(model, "*"):
            assert torch.equal(model(x), before(x))
        torchq.restore_(model)
        assert torch.equal(model(x), before(x))
        assert not hasattr(model[1], "gate_quantizer")


@pytest.mark.parametrize("num_bits", [4, (4, 3)])
def test_other_formats(num_bits: int | tuple[int, int]) -> None:
    module = convert_(
        nn.SiLU(),
        input=torchq.QuantDescriptor(num_bits, amax=4.0),
    )
    module.gate_quantizer.mode = "quantize"
    # Half a step of 4 / 7 at the largest slope, 1.1, and half a step of 1 / 15 of the gate times
    # 4; E4M3 is finer.
    assert (module(X) - torch.nn.functional.silu(X)).abs().max() < 0.315 + 0.134
    assert type(revert_(module)) is nn.SiLU
