"""The path of GPUs on the CPU, which has the same product.

A stand-in refuses what CUDA's product would refuse.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, weight_codes
from torchq.lowering.ops import cuda, onednn, reference, schemas
from torchq.lowering.ops.kernel_cache import KERNELS
from torchq.lowering.ops.params import Epilogue, Int8Weights


class CudaRules:
    """``_int_mm`` as CUDA has it.

    The checks are those of torch and of cuBLASLt (int8 kernels in the layout "TN" alone).
    """

    def _int_mm(self, a: Tensor, b: Tensor) -> Tensor:
        assert a.dtype is b.dtype is torch.int8
        assert a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0]
        assert a.shape[0] > 16
        assert all(size > 0 and size % 8 == 0 for size in b.shape)
        assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0])
        return (a.double() @ b.double()).to(torch.int32)


@pytest.fixture
def cuda_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "aten", CudaRules())


@pytest.mark.parametrize(("inner", "outer"), [(8, 8), (5, 3), (64, 17), (129, 40)])
def test_padded_products_equal_the_definition(
    inner: int, outer: int, generator: torch.Generator
) -> None:
    weight = weight_codes(outer, inner, generator=generator)
    scale = torch.rand(outer, generator=generator) * 1e-3
    for shape, zero, with_bias in itertools.product(
        ((), (1,), (17,), (3, 11)), (0, 128), (True, False)
    ):
        x = torch.randint(0, 256, (*shape, inner), generator=generator).to(torch.uint8)
        bias = torch.randn(outer, generator=generator) if with_bias else None
        weights = Int8Weights(weight, scale, bias, 0.02, zero)
        got = cuda.linear(x, weights, Epilogue())
        # The same integers and the same two float32 operations behind them.
        assert torch.equal(got, reference.linear(x, weights, Epilogue()))


@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (5, 3)])
@pytest.mark.parametrize("rows", [1, 16, 17, 32])
def test_operands_have_the_form_that_cuda_takes(
    inner: int, outer: int, rows: int, cuda_rules: None, generator: torch.Generator
) -> None:
    weight = weight_codes(outer, inner, generator=generator)
    wide = torch.randint(0, 256, (rows, 2 * inner), generator=generator).to(torch.uint8)
    weights = Int8Weights(weight, torch.ones(outer), None, 1.0, 128)
    for x in (
        wide[:, :inner],
        wide[:, ::2],
        wide[:, :inner].t().contiguous().t(),
        wide[:, :inner].unsqueeze(1),
    ):
        got = cuda.linear(x, weights, Epilogue())
        expected = reference.linear(x, weights, Epilogue())
        assert torch.equal(got.reshape(rows, outer), expected.view(rows, outer))


@pytest.mark.parametrize("name", ["relu", "gelu"])
def test_results_are_rounded_to_codes(name: str, generator: torch.Generator) -> None:
    x = torch.randint(0, 256, (4, 16), generator=generator).to(torch.uint8)
    weight = weight_codes(8, 16, generator=generator)
    weights = Int8Weights(weight, torch.full((8,), 1e-3), None, 0.02, 128)
    epilogue = Epilogue(0.05, 3, torch.uint8, name)
    got, expected = (module.linear(x, weights, epilogue) for module in (cuda, reference))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("shape", [(5, 9), (16, 32)], ids=["padded", "as it is"])
def test_weights_are_prepared_once_and_not_kept_alive(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, padded = [], cuda.padded
    monkeypatch.setattr(
        cuda,
        "padded",
        lambda matrix, *args: calls.append(matrix) or padded(matrix, *args),
    )
    before = len(KERNELS)
    x, weight = torch.ones(20, shape[1], dtype=torch.uint8), torch.ones(shape, dtype=torch.int8)
    for _ in range(2):
        weights = Int8Weights(weight, torch.ones(shape[0]), None, 1.0, 0)
        cuda.linear(x, weights, Epilogue())
    assert len(KERNELS) == before + 1
    assert sum(matrix is weight for matrix in calls) == 1
    calls.clear()
    del weight, weights
    assert len(KERNELS) == before


def test_kernels_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.missing.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    reason = "torch._int_mm needs compute capability 8.0, this GPU has 7.5"
    assert schemas.kernel(torch.device("cuda", 7), "linear") == ("reference", reason)
    cuda.missing.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert schemas.kernel(torch.device("cuda", 7), "linear") == ("int_mm", "")
    assert schemas.kernel(torch.device("cuda", 7), "conv") == (
        "reference",
        "integer convolutions run on CPUs, not on cuda",
    )
    cuda.missing.cache_clear()


def test_the_summary_says_why_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "available", lambda: False)
    for layer, shape in ((nn.Linear(8, 4), (2, 8)), (nn.Conv1d(8, 4, 1), (2, 8, 3))):
        (row,) = torchq.summary(torchq.deploy(calibrated(layer, torch.randn(shape)))).layers
        assert (row.kernel, row.note) == (
            "reference uint8 x int8 -> float32",
            "this torch has no oneDNN operators",
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (5, 3)])
@pytest.mark.parametrize("rows", [1, 16, 17, 100])
def test_on_a_gpu(inner: int, outer: int, rows: int, generator: torch.Generator) -> None:
    if problem := cuda.obstacle(torch.device("cuda", 0)):
        pytest.skip(problem)
    weight = weight_codes(outer, inner, generator=generator).cuda()
    x = torch.randint(0, 256, (rows, inner), generator=generator).to(torch.uint8).cuda()
    weights = Int8Weights(weight, torch.full((outer,), 1e-3, device="cuda"), None, 0.02, 128)
    got = schemas.int8_linear(x, weights, Epilogue())
    assert torch.equal(got, reference.linear(x, weights, Epilogue()))
