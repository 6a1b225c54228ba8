"""The path of GPUs, run on the CPU: the same product exists there."""

from __future__ import annotations

import itertools

import pytest
import torch

from torchq.deployment import int_mm, ops, reference

POST = (1.0, 0, torch.float32, "none", [])


@pytest.mark.parametrize(("inner", "outer"), [(8, 8), (5, 3), (64, 17), (129, 40)])
def test_padded_products_equal_the_definition(inner: int, outer: int, generator: torch.Generator) -> None:
    weight = torch.randint(-128, 128, (outer, inner), generator=generator).to(torch.int8)
    step = torch.rand(outer, generator=generator) * 1e-3
    for shape, zero, with_bias in itertools.product(((), (1,), (17,), (3, 11)), (0, 128), (True, False)):
        x = torch.randint(0, 256, (*shape, inner), generator=generator).to(torch.uint8)
        bias = torch.randn(outer, generator=generator) if with_bias else None
        got = int_mm.linear(x, weight, step, bias, 0.02, zero, *POST)
        # The same integers and the same two float32 operations behind them.
        assert torch.equal(got, reference.linear(x, weight, step, bias, 0.02, zero))


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_results_are_rounded_to_codes(name: str, generator: torch.Generator) -> None:
    x = torch.randint(0, 256, (4, 16), generator=generator).to(torch.uint8)
    weight = torch.randint(-128, 128, (8, 16), generator=generator).to(torch.int8)
    args = (x, weight, torch.full((8,), 1e-3), None, 0.02, 128, 0.05, 3, torch.uint8, name, [])
    assert torch.equal(int_mm.linear(*args), ops.linear_any(*args))


def test_weights_are_padded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(20, 9, dtype=torch.uint8), torch.ones(5, 9, dtype=torch.int8)
    for _ in range(2):
        int_mm.linear(x, weight, torch.ones(5), None, 1.0, 0, *POST)
    assert len(int_mm._PACKED) == 1
    del weight
    assert len(int_mm._PACKED) == 0


def test_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    int_mm.obstacle.cache_clear()
    assert int_mm.obstacle(torch.device("cpu")) == "torch._int_mm is used on CUDA devices, not on cpu"
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert int_mm.obstacle(torch.device("cuda", 7)) == "torch._int_mm needs compute capability 8.0, this GPU has 7.5"
    assert ops.kernel_name(torch.device("cuda", 7), "linear") == "reference"
    int_mm.obstacle.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert int_mm.obstacle(torch.device("cuda", 7)) == ""
    assert ops.kernel_name(torch.device("cuda", 7), "linear") == "int_mm"
    assert ops.kernel_name(torch.device("cuda", 7), "conv") == "reference"
    int_mm.obstacle.cache_clear()
