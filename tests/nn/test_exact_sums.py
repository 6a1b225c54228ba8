"""With ``exact_sums`` quantized layers add as integers do, and otherwise nothing changes."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

import torchq
from tests.models import simulated
from torchq import QuantDescriptor
from torchq.nn import QuantAdd, TensorQuantizer


class Call(nn.Module):
    """A product whose weight belongs to the module that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(50, 3000))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(600, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


#: Layers with sums above 2**24 units, which float32 cannot hold: all numbers are near 3.
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3000, 4), (2, 3000)),
    "conv1d": (lambda: nn.Conv1d(600, 4, 5, padding="same"), (2, 600, 8)),
    "conv2d": (lambda: nn.Conv2d(200, 4, 4, padding_mode="circular", padding=1), (2, 200, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(80, 4, 3), (2, 80, 4, 4, 4)),
    "transposed1d": (lambda: nn.ConvTranspose1d(3000, 2, 3), (2, 3000, 5)),
    "transposed2d": (lambda: nn.ConvTranspose2d(3000, 2, 3, stride=2), (2, 3000, 3, 3)),
    "transposed3d": (lambda: nn.ConvTranspose3d(3000, 2, 2), (2, 3000, 2, 2, 2)),
    "call": (Call, (20, 3000)),
    "attention": (Attention, (2, 3, 600)),
}


def quantized(layer: nn.Module, x: Tensor) -> nn.Module:
    """Return a calibrated model with scales that are powers of two: its products are exact."""
    model = nn.Sequential(layer).eval()
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 2.5, 4)
    simulated(model, [x], torchq.recipes.integer(8, 8), example=x, correct=False)
    for quantizer in model.modules():
        if isinstance(quantizer, torchq.TensorQuantizer) and quantizer.quantizing:
            quantizer.set_amax(torch.full_like(quantizer.amax, 127 / 32))
    return model


@pytest.mark.parametrize("name", LAYERS)
def test_sums_are_those_of_float64_rounded_once(name: str) -> None:
    make, shape = LAYERS[name]
    x = 2.5 + 1.5 * torch.rand(shape)
    model = quantized(make(), x)
    expected = copy.deepcopy(model).double()(x.double()).float()
    plain = model(x)
    with torchq.exact_sums(model):
        found = model(x)
    # The softmax of attention is no sum of a quantized layer.
    allowed = 1e-6 if name == "attention" else 0
    torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)
    assert name == "attention" or not torch.equal(plain, found)
    assert torch.equal(model(x), plain)


def test_sums_are_those_of_integers() -> None:
    x = 2.5 + 1.5 * torch.rand(2, 200, 5, 5)
    model = quantized(nn.Conv2d(200, 4, 4, bias=False), x)
    layer: Any = model[0]
    windows = F.unfold(layer.input_quantizer.codes(x).double(), 4).long()
    codes = layer.weight_quantizer.codes(layer.weight.detach()).flatten(1).long()
    sums = torch.einsum("ok,nkp->nop", codes, windows)
    with torchq.exact_sums(model):
        assert torch.equal(model(x).flatten(2), (sums.double() * 2.0**-10).float())


@pytest.mark.parametrize("low_dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(low_dtype: torch.dtype) -> None:
    x = torch.randn(2, 3000).to(low_dtype)
    model = quantized(nn.Linear(3000, 4).to(low_dtype), x)
    expected = copy.deepcopy(model).double()(x.double()).to(low_dtype)
    with torchq.exact_sums(model):
        assert torch.equal(model(x), expected)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_blocks_may_be_nested_and_end_with_an_error() -> None:
    x = 2.5 + 1.5 * torch.rand(2, 3000)
    model = quantized(nn.Linear(3000, 4), x)
    plain = model(x)
    with torchq.exact_sums(model), torchq.exact_sums(model):
        exact = model(x)
        assert _get_current_function_mode() is None  # Nothing else is slower.
    layer: Any = model[0]
    with torchq.exact_sums(model), pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(2, 7))
    assert _get_current_function_mode() is None
    layer.input_quantizer = Interrupted()
    with pytest.raises(KeyboardInterrupt), torchq.exact_sums(model):
        model(x)
    assert _get_current_function_mode() is None
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    assert not torch.equal(plain, exact)


def test_gradients_pass_and_float_layers_stay() -> None:
    x = torch.randn(2, 3000)
    model = nn.Sequential(nn.Linear(3000, 8), quantized(nn.Linear(8, 4), torch.randn(2, 8)))
    expected = model[0](x)
    seen = []
    model[0].register_forward_hook(lambda *args: seen.append(args[-1]))
    with torchq.exact_sums(model):
        model(x).sum().backward()
    assert torch.equal(seen[0], expected)
    assert all(p.grad is not None and p.grad.dtype is p.dtype for p in model.parameters())


class Sum(nn.Module):
    """Two tensors of codes, and the quantizer that a kernel rounds their sum for."""

    def __init__(self) -> None:
        super().__init__()
        self.add, codes = QuantAdd(), QuantDescriptor(8, symmetric=False, unsigned=True)
        self.add.input_quantizer, self.add.other_quantizer, self.after = (
            TensorQuantizer(codes) for _ in range(3)
        )
        self.add.rounded_by = "after"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after.codes(self.add(x, y).relu())


def test_sums_of_codes_are_rounded_as_a_kernel_does() -> None:
    """Of all pairs of codes, one is nearly at a tie, which fused multiply-adds turn over."""
    model = Sum()
    ends = [model.add.input_quantizer, model.add.other_quantizer, model.after]
    numbers = [(0.064195, 113), (0.03233693, 0), (0.037360374, 0)]
    for quantizer, (scale, zero_point) in zip(ends, numbers, strict=True):
        quantizer.set_qparams(torch.tensor(scale), torch.tensor(zero_point))
    codes = torch.arange(256.0)
    x = ((codes - 113) * ends[0].scale)[:, None].expand(256, 256)
    y = (codes * ends[1].scale)[None].expand(256, 256)
    first, second = (ends[i].scale.double() / ends[2].scale.double() for i in (0, 1))
    exact = (codes.double() - 113)[:, None] * first + codes.double()[None] * second
    with torch.no_grad(), torchq.exact_sums(model):
        found = model(x, y)
    differs = found != exact.round().clamp(0, 255)
    assert differs.nonzero().tolist() == [[112, 43]]
    assert float(found[112, 43]) == 36 and 35.4999 < float(exact[112, 43]) < 35.5
