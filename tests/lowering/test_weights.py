"""Weights of deployed layers: packed copies are shared, plain ones dropped, and nothing is lost."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import Residual, calibrated, stored_state
from torchq.lowering import Int8Layer, onednn
from torchq.lowering.packed import KERNELS
from torchq.lowering.release_weights import release_weights_, restore_weights_

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


def test_images_of_all_sizes_share_a_weight() -> None:
    before = alive()
    model, images = convolution()
    most = layouts(model, images)
    alone = [copy.deepcopy(model)(x) for x in images]
    for x, expected in zip(images, alone, strict=True):
        assert torch.equal(model(x), expected)
    assert alive() - before == most


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


def int8_layers(model: nn.Module) -> list[Int8Layer]:
    return [m for m in model.modules() if isinstance(m, Int8Layer)]


def released(fuse: bool = True) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a deployed network without its weights, the same with them, and an input."""
    x = torch.randn(2, 3, 16, 16)
    whole = torchq.deploy(calibrated(Residual().eval(), x), fuse=fuse)
    model = copy.deepcopy(whole)
    model(x), model(x.abs())
    assert [m.released_bytes() for m in int8_layers(model)] == [
        m.weight_codes.numel() for m in int8_layers(whole)
    ]
    return model, whole, x


@pytest.mark.parametrize("fuse", [True, False])
def test_results_of_any_size_are_the_same(fuse: bool) -> None:
    model, whole, x = released(fuse)
    for data in (x, x.abs(), x[..., :10, :12], x[:1]):
        assert torch.equal(model(data), whole(data))


def test_the_plain_weights_are_freed() -> None:
    x = torch.randn(2, 3, 16, 16)
    model = torchq.deploy(calibrated(Residual().eval(), x), fuse=False)
    weights = [weakref.ref(m.weight_codes) for m in int8_layers(model)]
    model(x.abs()), model(x)  # with the twins for unsigned input
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(weights)


def test_who_reads_the_buffers_brings_the_weights_back() -> None:
    model, whole, x = released()
    for one, other in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(one, other)
    assert not any(m.released_bytes() for m in int8_layers(model))
    assert torch.equal(model(x), whole(x))
    assert release_weights_(model) == sum(m.weight_codes.numel() for m in int8_layers(whole))
    assert torch.equal(model(x), whole(x))


def test_the_plain_weights_stay_away_in_eval_mode() -> None:
    model, whole, x = released()
    before = [m.released_bytes() for m in int8_layers(model)]
    assert torch.equal(model.eval()(x), whole(x)) and all(before)
    assert [m.released_bytes() for m in int8_layers(model)] == before


@pytest.mark.parametrize("name", ["weight_codes", "weight_scale", "bias"])
def test_a_tensor_of_a_released_layer_can_be_replaced(name: str) -> None:
    model, whole, x = released(fuse=False)
    before = model(x)
    for layer in (int8_layers(model)[0], int8_layers(whole)[0]):
        negative = -getattr(layer, name)
        setattr(layer, name, negative)
        assert torch.equal(layer.state_dict()[name], negative)
    assert torch.equal(model(x), whole(x))
    assert not torch.equal(model(x), before)


def test_state_dicts_files_and_copies_are_whole() -> None:
    model, whole, x = released()
    expected, state = whole(x), model.state_dict()
    assert state.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(state[name], value), name
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    copies.append(torch.load(file, weights_only=False))
    for other in copies:
        assert torch.equal(other(x), expected)
        assert all("weight_codes" in dict(m.named_buffers()) for m in int8_layers(other))
    assert all(m.released_bytes() for m in int8_layers(model))


def test_weights_that_come_back_in_inference_mode_are_ordinary_tensors() -> None:
    (model, _, x), (_, other, _) = released(), released()
    with torch.inference_mode():
        model(x)
        assert not any(buffer.is_inference() for buffer in model.buffers())
    model.load_state_dict(stored_state(other))
    assert torch.equal(model(x), other(x))


def test_a_released_model_can_be_converted() -> None:
    model, whole, x = released()
    model.to(torch.bfloat16), whole.to(torch.bfloat16)
    assert torch.equal(model(x.bfloat16()), whole(x.bfloat16()))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(8, 16, 3), (2, 8, 9)),
        (nn.Conv2d(16, 32, 3, 2, 1, groups=4), (1, 16, 9, 9)),
        (nn.Conv2d(18, 18, 3, groups=18), (1, 18, 9, 9)),
        (nn.Conv3d(4, 8, 3), (1, 4, 5, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3, 2), (2, 4, 5, 3)),
        (nn.Linear(32, 32), (3, 32)),
        (nn.Linear(20, 7), (3, 20)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_unpacking_loses_nothing(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    model = torchq.deploy(calibrated(layer, x))
    assert isinstance(model, Int8Layer)
    plain, weight, row = model.weight_codes.clone(), model.weight, model.summary_row()
    assert release_weights_(model) == 0  # has not run
    model(x)
    assert model.released_bytes() == plain.numel() and release_weights_(model) == 0
    assert torch.equal(model.weight_codes, plain) and torch.equal(model.weight, weight)
    assert model.summary_row() == row and "weight=" in repr(model)
    restore_weights_(model)
    assert torch.equal(dict(model.named_buffers())["weight_codes"], plain)


def test_a_model_that_has_run_can_be_compiled_and_exported() -> None:
    model, whole, x = released()
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), whole(x))
    torch._dynamo.reset()
    model, whole, x = released()
    assert torch.equal(torch.export.export(model, (x,)).module()(x), whole(x))


MAPS = Path("/proc/self/maps")


def file_at(address: int) -> str:
    """Which file is mapped to an address of this process; empty for its own memory."""
    for line in MAPS.read_text(encoding="utf-8").splitlines():
        span, *rest = line.split(maxsplit=5)
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= address < high:
            return rest[4] if len(rest) == 5 else ""
    return ""


def addresses(model: nn.Module) -> list[int]:
    return [m.weight_codes.data_ptr() for m in model.modules() if isinstance(m, Int8Layer)]


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_weights_of_a_mapped_file_are_never_copied(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    int8 = torchq.deploy(calibrated(Residual().eval(), x), x)
    expected = int8(x)
    path = tmp_path / "model"
    torch.save(int8, path)
    mapped = torch.load(path, mmap=True, weights_only=False)
    assert {file_at(address) for address in addresses(mapped)} == {str(path)}
    for size in (16, 8, 16):
        assert torch.equal(mapped(x[..., :size, :size]), int8(x[..., :size, :size]))
    assert torch.equal(copy.deepcopy(mapped)(x), expected)
    assert {file_at(address) for address in addresses(int8)}.isdisjoint({str(path)})


@pytest.mark.skipif(not onednn.available(), reason="needs torch's oneDNN operators")
def test_packed_weights_go_with_the_model() -> None:
    gc.collect()  # traced models hold cycles
    before = len(KERNELS)
    x = torch.randn(2, 3, 16, 16)
    int8 = torchq.deploy(calibrated(Residual().eval(), x))
    int8(x)
    found = [m for m in int8.modules() if isinstance(m, Int8Layer)]
    packed = [weakref.ref(vars(m)["_packed_weight"]) for m in found]
    assert packed and all(ref() is not None for ref in packed)
    del int8, found
    gc.collect()
    assert [ref() for ref in packed] == [None] * len(packed)
    assert len(KERNELS) == before


def compare(model: nn.Module, x: Tensor, expected: Tensor) -> None:
    """Run in another process, which ends with an error where the results differ."""
    assert torch.equal(model(x), expected)


def test_a_spawned_process_gets_a_deployed_model_that_has_run() -> None:
    x = torch.randn(1, 3, 8, 8)
    model = torchq.deploy(calibrated(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), x), x)
    arguments = (model, x, model(x))
    process = torch.multiprocessing.get_context("spawn").Process(target=compare, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode == 0
