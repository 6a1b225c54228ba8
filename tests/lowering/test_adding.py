"""Convolutions that add: pointwise ones as products of matrices, where torch copies its sums."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import weight_codes
from tests.lowering.pass_graphs import (
    apply,
    conv,
    edit,
)
from torchq.lowering import Int8Conv
from torchq.lowering.ops import onednn, reference
from torchq.lowering.ops.params import ConvParams, Epilogue, Int8Weights

pytestmark = pytest.mark.skipif(not onednn.available(), reason="no oneDNN operators")

#: Shapes of images: of one pixel, of one channel, without a second dimension, and an ordinary one.
SHAPES = [(2, 16, 1, 1), (2, 1, 3, 5), (2, 16, 9), (3, 20, 7, 5)]
POINTWISE = ConvParams((1, 1), (0, 0), (1, 1))


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small sums be products too."""
    onednn.saturates()
    onednn._convolution_copies()  # before a test notes what is bound
    monkeypatch.setattr(onednn, "_LARGE", 0)


def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note which operator is bound for an addition."""
    seen: list[str] = []

    def noting(name: str, bind: Callable[..., onednn.Run]) -> Callable[..., onednn.Run]:
        def note_and_bind(*args: Any) -> onednn.Run:
            seen.append(name)
            return bind(*args)

        return note_and_bind

    for name in ("_add_product", "_add_convolution"):
        monkeypatch.setattr(onednn, name, noting(name, getattr(onednn, name)))
    return seen


def numbered(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize("zero", [0, 128])
def test_a_pointwise_convolution_adds(
    copies: bool,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    activation: str,
    zero: int,
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(onednn, "_convolution_copies", lambda: copies)
    seen = kinds(monkeypatch)
    dims = len(shape) - 2
    weight = weight_codes(32, shape[1], *[1] * dims, generator=generator)
    scale = torch.rand(32, generator=generator) * 1e-2 + 1e-3
    weights = Int8Weights(weight, scale, torch.randn(32, generator=generator), 0.02, zero)
    params = ConvParams((1,) * dims, (0,) * dims, (1,) * dims)
    codes = dtype is torch.uint8
    epilogue = Epilogue(
        *(0.05, 100) if codes else (1.0, 0),
        dtype,
        activation,
        (),
        *(0.03, 90) if codes else (1.0, 0),
    )
    x, residual = numbered(shape, generator), numbered((shape[0], 32, *shape[2:]), generator)
    residual = residual if codes else residual.float() - 128
    kept = residual.clone()
    got = onednn.bind_conv(shape, weights, params, epilogue, residual)(x, residual)
    expected = reference.conv(x, weights, params, epilogue, residual)
    assert seen == ["_add_product" if copies else "_add_convolution"]
    assert got.dtype is dtype and torch.equal(residual, kept)
    # A few roundings of float32 sums of up to 300; codes may differ by one next to a tie.
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=1 if codes else 1e-4)
    assert (got != expected).float().mean() < 0.01 or not codes
    if dims == 2:
        assert got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("params", "size"),
    [
        (POINTWISE._replace(stride=(2, 1)), 1),
        (POINTWISE._replace(padding=(1, 1)), 1),
        (POINTWISE._replace(groups=4), 1),
        (POINTWISE, 3),
    ],
)
def test_other_convolutions_are_no_products(
    params: ConvParams, size: int, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_convolution_copies", lambda: True)
    weight = weight_codes(32, 16 // params.groups, size, size, generator=generator)
    weights = Int8Weights(weight, torch.full((32,), 1e-3), None, 0.02, 0)
    x = numbered((2, 16, 8, 8), generator)
    residual = torch.randn(params.output_shape(x.shape, weight.shape), generator=generator)
    seen = kinds(monkeypatch)
    got = onednn.bind_conv(x.shape, weights, params, Epilogue(), residual)(x, residual)
    assert seen == ["_add_convolution"]
    torch.testing.assert_close(
        got, reference.conv(x, weights, params, Epilogue(), residual), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(("size", "expected"), [(7, "_add_convolution"), (8, "_add_product")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_large_sums_are_products(
    size: int, expected: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "_convolution_copies", lambda: True)
    monkeypatch.setattr(onednn, "_LARGE", 2 * 32 * 8 * 8 * dtype.itemsize)
    weights = Int8Weights(torch.ones(32, 16, 1, 1, dtype=torch.int8), torch.ones(32), None, 0.02, 0)
    seen = kinds(monkeypatch)
    residual = torch.zeros(2, 32, size, size, dtype=dtype)
    epilogue = Epilogue(1.0, 0, dtype)
    onednn.bind_conv((2, 16, size, size), weights, POINTWISE, epilogue, residual)
    assert seen == [expected]


class Block(nn.Module):
    """A bottleneck whose shortcut is a strided convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 8, 3, 2, 1)
        self.last, self.shortcut = nn.Conv2d(8, 32, 1), nn.Conv2d(16, 32, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        return torch.relu(self.last(torch.relu(self.inner(x))) + self.shortcut(x)).mean((2, 3))


def test_a_deployed_block_gives_its_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight that is packed for a product is unpacked for files, copies and state dicts."""
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(2, 3, 15, 15)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    with torch.no_grad():
        monkeypatch.setattr(onednn, "_convolution_copies", lambda: False)
        expected = torchq.deploy(model, x)(x)
        monkeypatch.setattr(onednn, "_convolution_copies", lambda: True)
        seen, int8 = kinds(monkeypatch), torchq.deploy(model)
        plain = copy.deepcopy(int8.state_dict())
        y = int8(x)
        torch.testing.assert_close(y, expected)
        assert seen == ["_add_product"]
        layers = [m for m in int8.modules() if isinstance(m, Int8Conv)]
        assert all(layer.released_bytes() for layer in layers)
        after = int8.state_dict()
        assert plain.keys() == after.keys()
        tensors = {name: value for name, value in plain.items() if isinstance(value, Tensor)}
        assert all(torch.equal(after[name], value) for name, value in tensors.items())
        assert torch.equal(copy.deepcopy(int8)(x), y)
        for size in (21, 15):  # another size of images, and the first again
            int8(torch.randn(1, 3, size, size))
        assert torch.equal(int8(x), y)


def test_of_two_convolutions_the_pointwise_one_adds() -> None:
    strided = conv(params=ConvParams((2, 2), (0, 0), (1, 1)))
    for forward in (lambda m, x, y: m.a(x) + m.b(y), lambda m, x, y: m.b(y) + m.a(x)):
        editor = edit({"a": conv(), "b": strided}, forward)
        assert apply(editor, "fuse_add")
        (node,) = [n for n in editor.graph.nodes if n.op == "call_module" and len(n.args) == 2]
        layer = editor.layer(node)
        assert isinstance(layer, Int8Conv) and layer.params == POINTWISE
