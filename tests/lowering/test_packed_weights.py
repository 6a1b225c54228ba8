"""Packed weights: sizes, batches and rebound layers share a copy, and results stay the same."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated
from torchq.lowering import Int8Layer, onednn, release_weights
from torchq.lowering import packed as packed_weights
from torchq.lowering.packed import MOST_SHAPES
from torchq.lowering.release_weights import restore_weights_

pytestmark = pytest.mark.skipif(not onednn.available(), reason="needs torch's oneDNN operators")

SIZES = (16, 12, 20, 9)


def alive() -> int:
    """Return how many packed weights there are in this process."""
    gc.collect()
    return sum(type(thing) is Tensor and thing.is_mkldnn for thing in gc.get_objects())


def deployed(layer: nn.Module, x: Tensor) -> Int8Layer:
    model = torchq.deploy(calibrated(layer, x))
    assert isinstance(model, Int8Layer)
    return model


def convolution() -> tuple[Int8Layer, list[Tensor]]:
    """Return a deployed convolution, and images of several sizes and batches."""
    images = [torch.randn(batch, 32, size, size) for size in SIZES for batch in (1, 3)]
    return deployed(nn.Conv2d(32, 48, 3), images[0]), images


def layouts(model: Int8Layer, images: list[Tensor]) -> int:
    """Return how many layouts oneDNN asks for."""
    plain, found = model.weight_codes, set()
    for x in images:
        packed = torch.ops.onednn.qconv_prepack(
            plain, torch.ones(48), 1.0, 0, [1, 1], [0, 0], [1, 1], 1, list(x.shape)
        )
        found.add(bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).tolist()))
    return len(found)


def linear_layouts_are_whole() -> bool:
    """Return True if the layout of one weight is the same before and after it is used."""
    x, plain = torch.zeros(3, 32, dtype=torch.uint8), torch.ones(16, 32, dtype=torch.int8)
    pack, scale = torch.ops.onednn.qlinear_prepack, torch.ones(16)
    packed, zero = pack(plain, None), torch.zeros(16, dtype=torch.int64)
    torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 0, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], "none"
    )
    return packed_weights._layout(packed) == packed_weights._layout(pack(plain, None))


def test_images_of_all_sizes_share_a_weight() -> None:
    before = alive()
    model, images = convolution()
    most = layouts(model, images)
    alone = [copy.deepcopy(model)(x) for x in images]
    for x, expected in zip(images, alone, strict=True):
        assert torch.equal(model(x), expected)
    assert alive() - before == most


def test_sizes_share_a_weight_in_calls_of_the_kernel() -> None:
    before = alive()
    model, images = convolution()
    layer, most = model.int8_weights(), layouts(model, images)
    for x in images:
        codes = torch.zeros(x.shape, dtype=torch.uint8)
        onednn.conv(codes, layer, model.params, model.epilogue())
    assert alive() - before == most


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(32, 16), (3, 32)), (nn.Conv2d(32, 16, 1), (1, 32, 8, 8))],
    ids=["linear", "conv"],
)
def test_a_layer_whose_attributes_change_packs_nothing_anew(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    if isinstance(layer, nn.Linear) and not linear_layouts_are_whole():
        pytest.skip("this torch leaves a part of the layout of linear layers undefined")
    before, x = alive(), torch.randn(shape)
    model = deployed(layer, x)
    for _ in range(3):
        expected = model(x)
        assert torch.equal(model.train().eval()(x), expected)
    assert alive() - before == 1 and model.released_bytes()


def test_a_weight_without_a_known_layout_is_packed_for_each_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_weights, "_layout", lambda packed: None)
    before = alive()
    model, images = convolution()
    alone = [copy.deepcopy(model)(x) for x in images]
    for x, expected in zip(images, alone, strict=True):
        assert torch.equal(model(x), expected)
    assert alive() - before >= len(SIZES)


def test_layouts_that_differ_are_told_apart() -> None:
    plain = torch.randint(-127, 128, (64, 64), dtype=torch.int8)
    linear, negative = (torch.ops.onednn.qlinear_prepack(w, None) for w in (plain, -plain))
    conv = torch.ops.onednn.qconv_prepack(
        plain.view(64, 64, 1, 1), torch.ones(64), 1.0, 0, [1, 1], [0, 0], [1, 1], 1, [1, 64, 8, 8]
    )
    layout = packed_weights._layout(linear)
    assert layout == packed_weights._layout(negative)
    assert layout != packed_weights._layout(conv)


def test_a_plain_weight_that_is_changed_in_place_is_packed_anew() -> None:
    model, images = convolution()
    x = torch.randint(0, 256, images[0].shape).to(torch.uint8)
    model(images[0])
    assert model.released_bytes()
    codes, fresh = model.weight_codes, model.weight_codes.neg_().clone()
    codes.neg_()
    layer = model.int8_weights()
    got, expected = (
        onednn.conv(x, layer._replace(codes=c), model.params, model.epilogue())
        for c in (codes, fresh)
    )
    assert torch.equal(got, expected)


def test_a_changed_weight_that_is_dropped_comes_back_changed() -> None:
    model, images = convolution()
    model(images[0])
    old = vars(model)["_packed_weight"]  # as another thread that still computes would hold it
    restore_weights_(model)
    with torch.no_grad():
        model.weight_codes.neg_()
    changed = model.weight_codes.clone()
    model.eval()  # drops the kernels
    model(images[0])
    assert model.released_bytes() and vars(model)["_packed_weight"] is not old
    assert torch.equal(model.weight_codes, changed)


def test_copies_of_sizes_that_are_gone_are_freed() -> None:
    before = alive()
    model, images = convolution()
    for x in images:
        model(x)
    assert alive() - before == layouts(model, images)
    model.eval()  # drops the kernels
    assert alive() - before == 1


def test_a_layer_keeps_the_kernels_of_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, bind = [], onednn.bind_conv
    monkeypatch.setattr(
        onednn, "bind_conv", lambda shape, *args: bound.append(shape[-1]) or bind(shape, *args)
    )
    images = [torch.randn(1, 32, 8, 8 + width) for width in range(MOST_SHAPES + 1)]
    model = deployed(nn.Conv2d(32, 16, 3), images[0])
    for image in images[:-1] * 2 + images[-1:] + images[1:]:
        model(image)
    assert bound == [image.shape[-1] for image in images]
    model(images[0])
    assert len(bound) == len(images) + 1


def test_a_plain_weight_is_unpacked_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = convolution()
    model(images[0])
    unpacked, unpack = [], release_weights.unpack_weight
    monkeypatch.setattr(
        release_weights, "unpack_weight", lambda *args: unpacked.append(args) or unpack(*args)
    )
    for x in images * 2:
        model(x)
    assert len(unpacked) == len(images) - 1
