"""Memory: plain weights may lie in a mapped file, and packed copies go with their weights."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import Residual, calibrated
from torchq.lowering import Int8Layer, onednn
from torchq.lowering.packed import KERNELS, MOST_SHAPES, KernelCache

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


@pytest.mark.skipif(not MAPS.exists(), reason="needs /proc")
def test_a_mapped_state_dict_can_be_taken_over(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 16, 16)
    network = Residual().eval()
    first = torchq.deploy(calibrated(copy.deepcopy(network), x), x)
    with torch.no_grad():
        network.conv1.weight.neg_()
    second = torchq.deploy(calibrated(network, x), x)
    assert not torch.equal(second(x), first(x))
    path = tmp_path / "weights"
    torch.save(first.state_dict(), path)
    second.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
    assert {file_at(address) for address in addresses(second)} == {str(path)}
    assert torch.equal(second(x), first(x))


@pytest.mark.skipif(not onednn.available(), reason="needs torch's oneDNN operators")
def test_packed_weights_go_with_the_model() -> None:
    gc.collect()  # traced models hold cycles
    before = len(KERNELS)
    x = torch.randn(2, 3, 16, 16)
    int8 = torchq.deploy(calibrated(Residual().eval(), x))
    int8(x)
    layers = [m for m in int8.modules() if isinstance(m, Int8Layer)]
    packed = [weakref.ref(vars(m)["_packed_weight"]) for m in layers]
    assert packed and all(ref() is not None for ref in packed)
    del int8, layers
    gc.collect()
    assert [ref() for ref in packed] == [None] * len(packed)
    assert len(KERNELS) == before


def test_the_oldest_of_many_sizes_goes() -> None:
    cache, weight, built = KernelCache(most=3), torch.ones(4), list[int]()

    def get(key: int) -> int:
        return cache.get(weight, ("kind", key), (), lambda: built.append(key) or key)  # type: ignore[func-returns-value]

    assert [get(key) for key in (1, 2, 3, 1, 4, 2, 3, 4, 1)] == [1, 2, 3, 1, 4, 2, 3, 4, 1]
    assert built == [1, 2, 3, 4, 1]


def test_kernels_of_many_sizes_are_kept() -> None:
    cache, weight, built = KernelCache(), torch.ones(4), list[int]()
    for size in [*range(MOST_SHAPES)] * 2:
        cache.get(weight, ("kind", size), (), lambda size=size: built.append(size))  # type: ignore[misc]
    assert built == [*range(MOST_SHAPES)]


def test_kernels_made_while_another_is_made_are_kept() -> None:
    cache, weight, built = KernelCache(), torch.ones(4), list[str]()

    def outer() -> str:
        return cache.get(weight, ("inner", 0), (), lambda: built.append("inner") or "x")  # type: ignore[func-returns-value]

    for _ in range(2):
        assert cache.get(weight, ("outer", 0), (), outer) == outer() == "x"
    assert built == ["inner"]
