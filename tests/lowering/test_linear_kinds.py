from __future__ import annotations

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import DynamicInt8Linear

D = torchq.QuantDescriptor


def config(**descriptors: torchq.QuantDescriptor) -> torchq.QuantConfig:
    return torchq.QuantConfig((torchq.Rule(nn.Linear, **descriptors),))  # type: ignore[arg-type]


DYNAMIC = [
    (D(dynamic=True), (3, 5, 64)),
    (D(dynamic=True, axis=(0, 1)), (3, 5, 64)),
    (D(dynamic=True, axis=0), (7, 64)),
    (D(4, dynamic=True, axis=-2), (2, 64)),
    (D(dynamic=True, unsigned=True, axis=0), (7, 64)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("descriptor", "shape"), DYNAMIC, ids=str)
def test_dynamic_ranges(
    descriptor: torchq.QuantDescriptor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    x[0] = 0  # a token without a range
    model = calibrated(nn.Linear(64, 32).to(dtype), x, config(input=descriptor, weight=D(axis=0)))
    int8 = torchq.deploy(model)
    assert isinstance(int8, DynamicInt8Linear)
    assert sqnr(int8(x), model(x)) > (90 if dtype is torch.float32 else 38)


PER_TOKEN = {"input": D(dynamic=True, axis=0), "weight": D(axis=0)}


@pytest.mark.parametrize("rows", [2, 17])
def test_autocast_changes_nothing(rows: int) -> None:
    x = torch.randn(rows, 64)
    int8 = torchq.deploy(calibrated(nn.Linear(64, 16), x, config(**PER_TOKEN)))
    expected = int8(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = int8(x)
    assert got.dtype is torch.float32 and torch.equal(got, expected)


@pytest.mark.parametrize(
    "descriptors",
    [PER_TOKEN, {"input": D(dynamic=True), "weight": D(axis=0)}],
    ids=["per token", "per tensor"],
)
def test_exported_for_any_batch(descriptors: dict[str, torchq.QuantDescriptor]) -> None:
    x = torch.randn(5, 64)
    int8 = torchq.deploy(calibrated(nn.Linear(64, 16), x, config(**descriptors)))
    program = torch.export.export(
        int8, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    ).module()
    for rows in (2, 5, 17):
        x = torch.randn(rows, 64)
        assert torch.equal(program(x), int8(x))


def test_dynamic_ranges_along_features_are_refused() -> None:
    x = torch.randn(3, 64)
    model = calibrated(
        nn.Linear(64, 32), x, config(input=D(dynamic=True, axis=1), weight=D(axis=0))
    )
    with pytest.raises(
        torchq.errors.ExportError,
        match=r"got ranges along the features of \(3, 64\); expected one per token or tensor",
    ):
        torchq.deploy(model)(x)
