"""Attention in bfloat16: where it is used, what it computes, and when the engine takes it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.engines import torch_engine
from torchq.lowering import use_bfloat16_attention_
from torchq.lowering.modules import bfloat16_attention
from torchq.lowering.modules.bfloat16_attention import BFloat16Attention, attend_in_bfloat16


class Block(nn.Module):
    """Attention of four heads between linear layers, with a scale or causal where wanted."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.qkv, self.out, self.options = nn.Linear(16, 48), nn.Linear(16, 16), options

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], **self.options)
        return self.out(y.transpose(1, 2).flatten(2)) + x


@pytest.fixture
def x() -> Tensor:
    """Return eight tokens."""
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


def deployed(x: Tensor, **options: object) -> nn.Module:
    """Return a block on integers."""
    torch.manual_seed(0)
    return torchq.deploy(calibrated(Block(**options), x))


def flashes(model: nn.Module) -> list[bool]:
    """Return, for each attention that computes in bfloat16, whether torch's own kernel does."""
    return [module.flash for module in model.modules() if isinstance(module, BFloat16Attention)]


def halves(model: nn.Module) -> int:
    """Return how many attentions compute in bfloat16."""
    return len(flashes(model))


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("scale", [None, 0.1])
def test_products_are_those_of_bfloat16_numbers(scale: float | None, flash: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 8, generator=generator) for size in (5, 7, 7))
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    # Numbers of 8 bits are off by at most 2**-9 of their size, which is -54 dB.
    half = attend_in_bfloat16(q, k, v, scale, flash=flash)
    assert half.dtype is torch.float32 and 38 < sqnr(half, exact) < 60
    assert torch.equal(half, attend_in_bfloat16(q, k, v, scale, flash=not flash)) is False


def test_what_it_cannot_hold_or_multiply_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 7, 8, generator=generator) for _ in "qkv")
    double = attend_in_bfloat16(q.double(), k.double(), v.double())
    assert torch.equal(double, F.scaled_dot_product_attention(q.double(), k.double(), v.double()))
    flash = attend_in_bfloat16(q, k, v, flash=True)
    assert not torch.equal(attend_in_bfloat16(q, k, v), flash)
    monkeypatch.setattr(bfloat16_attention, "_MAX_WEIGHTS", 2 * 3 * 7 * 7 - 1)
    assert torch.equal(attend_in_bfloat16(q, k, v), flash)


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 1), ({"scale": 0.2}, 1), ({"is_causal": True}, 0)]
)
def test_plain_attention_is_changed(x: Tensor, options: dict[str, object], expected: int) -> None:
    model = deployed(x, **options)
    before = model(x)
    assert use_bfloat16_attention_(model) == halves(model) == expected
    for _ in range(3):
        assert torch.equal(model(x), before) is (not expected)
        assert sqnr(model(x), before) > 35
    kernels = [row.kernel for row in torchq.summary(model).layers]
    assert kernels.count("bfloat16") == expected
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


@pytest.mark.parametrize("flash", [False, True])
def test_multi_head_attention_is_changed_without_a_mask(x: Tensor, flash: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    model = torchq.deploy(calibrated(layer, x), x)
    before, mask = model(x), torch.zeros(8, 8)
    masked = model(x, src_mask=mask) if not hasattr(model, "graph") else None
    assert use_bfloat16_attention_(model, flash=flash) == 1
    assert not torch.equal(model(x), before) and sqnr(model(x), before) > 30
    assert masked is None or torch.equal(model(x, src_mask=mask), masked)


@pytest.mark.parametrize(
    ("products", "flash", "taken"),
    [(8.0, 9.0, [False]), (8.0, 7.0, [True]), (10.0, 8.0, [True]), (10.0, 10.0, [])],
)
def test_the_engine_takes_the_fastest(
    x: Tensor, products: float, flash: float, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(model: nn.Module, example: object) -> float:
        kernels = flashes(model)
        milliseconds = (flash if kernels[0] else products) if kernels else 10.0
        return milliseconds / 1000 * (1 if hasattr(model, "graph") else 5)

    monkeypatch.setattr(torch_engine, "_seconds", seconds)
    torch.manual_seed(0)
    model = calibrated(Block(), x)
    assert flashes(torchq.deploy(model, x)) == taken
