from __future__ import annotations

import pytest
import torch

from torchq.lowering.ops import cuda


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize(
    ("shape", "fewest", "expected"),
    [
        ((3, 5), 0, (16, 16)),
        ((16, 17), 0, (16, 32)),
        ((16, 16), 17, (32, 16)),
        ((17, 16), 17, (32, 16)),
        ((0, 16), 0, (0, 16)),
    ],
)
def test_zeros_fill_up_to_multiples(
    shape: tuple[int, int], fewest: int, expected: tuple[int, int], dtype: torch.dtype
) -> None:
    matrix = torch.arange(1, 1 + shape[0] * shape[1]).reshape(shape).remainder(8).to(dtype)
    for layout in (matrix, matrix.t().contiguous().t()):
        full = cuda.padded(layout, 16, fewest)
        assert full.dtype is dtype and full.shape == expected and full.is_contiguous()
        assert torch.equal(full[: shape[0], : shape[1]], matrix) and full.sum() == matrix.sum()


def test_nothing_is_copied_where_nothing_is_missing() -> None:
    matrix = torch.ones(32, 16, dtype=torch.int8)
    assert cuda.padded(matrix, 16, 17) is matrix


def test_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.missing.cache_clear()
    device = torch.device("cuda", 7)
    assert (
        cuda.missing(torch.device("cpu"), "a product", (8, 9))
        == "a product is used on CUDA devices, not on cpu"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert (
        cuda.missing(device, "a product", (8, 0))
        == "a product is used on CUDA devices, not on cuda (ROCm)"
    )
    cuda.missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    assert cuda.missing(device, "a product", (8, 0)) == ""
    assert (
        cuda.missing(device, "a product", (8, 9))
        == "a product needs compute capability 8.9, this GPU has 8.6"
    )
    cuda.missing.cache_clear()
