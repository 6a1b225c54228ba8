"""Additions that overwrite their residual, and inputs quantized a few images at a time."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.lowering import Int8Conv, QParams
from torchq.lowering import qparams as qparams_module


class Block(nn.Module):
    """A residual block; what happens to the residual besides is up to ``use``."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use
        self.stem, self.conv1, self.conv2 = (
            nn.Conv2d(3, 16, 3),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Conv2d(16, 16, 3, padding=1),
        )
        self.head = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = torch.relu(self.stem(x))
        turned = x.transpose(2, 3)  # before the sum, read after it
        y = torch.relu(self.conv2(torch.relu(self.conv1(x))) + x)
        if self.use == "later":
            return self.head(y) + self.conv1(x)
        if self.use == "returned":  # in floating point: the codes are another tensor
            return self.head(y), x
        if self.use == "view":
            return self.head(y) + self.conv2(turned)
        return self.head(y)


def placed(use: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return the deployed network, and the same without anything in place."""
    torch.manual_seed(0)
    model, x = Block(use).eval(), torch.randn(2, 3, 12, 12)
    torchq.quantize_(model, target="tensorrt")
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x)
    plain = copy.deepcopy(int8)
    for module in plain.modules():
        if isinstance(module, Int8Conv):
            module.overwrites_residual = False
    return int8, plain, x


@pytest.mark.parametrize(
    ("use", "expected"), [("once", True), ("later", False), ("returned", True), ("view", False)]
)
def test_a_residual_is_overwritten_by_its_last_reader_alone(use: str, expected: bool) -> None:
    int8, plain, x = placed(use)
    conv2 = next(
        m for m in int8.modules() if isinstance(m, Int8Conv) and m.residual_qparams is not None
    )
    assert conv2.overwrites_residual is expected
    before = x.clone()
    for _ in range(2):
        results = [y if isinstance(y, tuple) else (y,) for y in (int8(x), plain(x))]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(x, before)


def test_a_sum_in_place_is_the_residual() -> None:
    int8, plain, x = placed("once")
    seen: list[bool] = []
    for model in (int8, plain):
        layer = next(
            m for m in model.modules() if isinstance(m, Int8Conv) and m.residual_qparams is not None
        )
        forward = layer.forward
        layer.__dict__["forward"] = lambda x, r, forward=forward: (
            seen.append(torch.equal(y := forward(x, r), r)) or y
        )
        model(x)
    assert seen == [torch.backends.mkldnn.is_available(), False]


@pytest.mark.parametrize(
    "shape",
    [
        (5, 3, 8, 8),
        (1, 3, 8, 8),
        (0, 3, 8, 8),
        (4, 3, 0, 8),
        (7, 1, 9, 5),
        (2, 3, 31, 11),
        (1, 2, 4, 300),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_images_by_parts_are_images(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qparams_module, "_CACHED", 400)  # two images of the first shape
    monkeypatch.setattr(qparams_module, "_LARGE", 900)  # the last two shapes have larger images
    qparams, x = QParams(0.03, 128, 1, 255), torch.randn(shape).mul(3).to(dtype)
    codes = qparams.quantize_images(x)
    assert torch.equal(codes, qparams.quantize(x)) and codes.dtype is torch.uint8
    assert not codes.numel() or codes.is_contiguous(memory_format=torch.channels_last)


def test_large_images_are_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qparams_module, "_CACHED", 400)
    monkeypatch.setattr(qparams_module, "_LARGE", 900)
    seen: list[tuple[int, ...]] = []
    for shape in ((5, 3, 8, 8), (1, 3, 15, 20), (2, 3, 31, 11)):
        QParams(0.03, 128, 0, 255).quantize_images(
            torch.randn(shape), lambda part: seen.append(tuple(part.shape))
        )
    few, whole, rows = [(2, 3, 8, 8)] * 2 + [(1, 3, 8, 8)], [(1, 3, 15, 20)], [(1, 3, 12, 11)] * 2
    assert seen == [*few, *whole, *[*rows, (1, 3, 7, 11)] * 2]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [1, 3])
def test_quantizing_leaves_its_input_and_needs_no_gradient(
    channels: int, layout: torch.memory_format
) -> None:
    qparams = QParams(0.03, 128, 0, 255)
    x = torch.randn(2, channels, 4, 4).mul(9).contiguous(memory_format=layout).requires_grad_()
    before = x.detach().clone()
    assert not qparams.quantize(x).requires_grad and not qparams.quantize_images(x).requires_grad
    assert torch.equal(x.detach(), before)
