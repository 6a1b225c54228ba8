"""Deployed layers without their plain weights: the same results, files and copies."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import Residual, calibrated, stored_state
from torchq.lowering import Int8Layer, onednn
from torchq.lowering.release_weights import release_weights_, restore_weights_

pytestmark = pytest.mark.skipif(not onednn.available(), reason="needs torch's oneDNN operators")


def layers(model: nn.Module) -> list[Int8Layer]:
    return [m for m in model.modules() if isinstance(m, Int8Layer)]


def released(fuse: bool = True) -> tuple[nn.Module, nn.Module, Tensor]:
    """Return a deployed network without its weights, the same with them, and an input."""
    x = torch.randn(2, 3, 16, 16)
    whole = torchq.deploy(calibrated(Residual().eval(), x), fuse=fuse)
    model = copy.deepcopy(whole)
    model(x), model(x.abs())
    assert [m.released_bytes() for m in layers(model)] == [
        m.weight_codes.numel() for m in layers(whole)
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
    weights = [weakref.ref(m.weight_codes) for m in layers(model)]
    model(x.abs()), model(x)  # with the twins for unsigned input
    gc.collect()
    assert [ref() for ref in weights] == [None] * len(weights)


def test_who_reads_the_buffers_brings_the_weights_back() -> None:
    model, whole, x = released()
    for one, other in zip(model.buffers(), whole.buffers(), strict=True):
        assert torch.equal(one, other)
    assert not any(m.released_bytes() for m in layers(model))
    assert torch.equal(model(x), whole(x))
    assert release_weights_(model) == sum(m.weight_codes.numel() for m in layers(whole))
    assert torch.equal(model(x), whole(x))


def test_the_plain_weights_stay_away_in_eval_mode() -> None:
    model, whole, x = released()
    before = [m.released_bytes() for m in layers(model)]
    assert torch.equal(model.eval()(x), whole(x)) and all(before)
    assert [m.released_bytes() for m in layers(model)] == before


@pytest.mark.parametrize("name", ["weight_codes", "weight_scale", "bias"])
def test_a_tensor_of_a_released_layer_can_be_replaced(name: str) -> None:
    model, whole, x = released(fuse=False)
    before = model(x)
    for layer in (layers(model)[0], layers(whole)[0]):
        negative = -getattr(layer, name)
        setattr(layer, name, negative)
        assert torch.equal(layer.state_dict()[name], negative)
    assert torch.equal(model(x), whole(x))
    assert not torch.equal(model(x), before)


def test_a_buffer_of_a_released_layer_can_be_deleted() -> None:
    layer = layers(released()[0])[0]
    del layer.bias
    assert not hasattr(layer, "bias") and "bias" not in layer.state_dict()
    assert layer.weight_codes is layer.weight_codes  # the plain weight is back


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
        assert all("weight_codes" in dict(m.named_buffers()) for m in layers(other))
    assert all(m.released_bytes() for m in layers(model))


def test_another_state_can_be_loaded() -> None:
    (model, _, x), (_, other, _) = released(), released()
    model.load_state_dict(stored_state(other))
    assert torch.equal(model(x), other(x))


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
