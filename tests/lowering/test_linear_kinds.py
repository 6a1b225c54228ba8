from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import DynamicInt8Linear, Fp8Linear, WeightOnlyLinear
from torchq.lowering.ops.weight_only import MAX_ROWS, pack_int4, unpack_int4

D = torchq.QuantDescriptor


def config(**descriptors: torchq.QuantDescriptor) -> torchq.QuantConfig:
    return torchq.QuantConfig((torchq.Rule(nn.Linear, **descriptors),))  # type: ignore[arg-type]


WEIGHTS = [
    D(8, axis=0),
    D(8),
    D(4, block_size=128),
    D(4, block_size=32),
    D(4, axis=0),
    D(3, block_size=64),
    D(4, block_size=20),
    D(6, axis=0),
]


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
@pytest.mark.parametrize("rows", [(), (1,), (2, 3), (MAX_ROWS + 1,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_only(
    weight: torchq.QuantDescriptor, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    size = 640 if weight.block_size == 20 else 256
    x = torch.randn(*rows, size).to(dtype)
    model = calibrated(nn.Linear(size, 48).to(dtype), x, config(weight=weight))
    int8 = torchq.deploy(model)
    assert isinstance(int8, WeightOnlyLinear)
    expected = copy.deepcopy(model).double()(x.double())
    got = int8(x)
    assert got.dtype is dtype and got.shape == (*rows, 48)
    # Of bfloat16, products, scales and results have 8 bits; so they have with weights of 4.
    coarse = dtype is torch.bfloat16 or int8.bits == 4
    assert not rows or rows[0] == 0 or sqnr(got, expected) > (38 if coarse else 110)


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_survives_files_and_compilation(bits: int) -> None:
    x = torch.randn(2, 256)
    first, second = (
        torchq.deploy(calibrated(nn.Linear(256, 32), x, config(weight=D(bits, axis=0))))
        for _ in range(2)
    )
    expected = first(x)
    second(x)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    for other in (
        copy.deepcopy(first),
        second,
        torch.compile(first, fullgraph=True, backend="aot_eager"),
    ):
        assert torch.equal(other(x), expected)
    assert f"weight-only int{bits}" in str(torchq.summary(first))


def test_int4_codes_are_stored_two_in_a_byte() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 1)
    assert torch.equal(unpack_int4(pack_int4(codes)), codes)
    assert pack_int4(codes).shape == (2, 8)


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


KINDS = [
    ({"input": D(dynamic=True, axis=0), "weight": D(axis=0)}, DynamicInt8Linear),
    ({"input": D((4, 3)), "weight": D((4, 3), axis=0)}, Fp8Linear),
    ({"weight": D(axis=0)}, WeightOnlyLinear),
]


@pytest.mark.parametrize("rows", [2, MAX_ROWS + 1])
@pytest.mark.parametrize(
    "descriptors", [kind[0] for kind in KINDS], ids=["dynamic", "fp8", "weight-only"]
)
def test_autocast_changes_nothing(
    descriptors: dict[str, torchq.QuantDescriptor], rows: int
) -> None:
    x = torch.randn(rows, 64)
    int8 = torchq.deploy(calibrated(nn.Linear(64, 16), x, config(**descriptors)))
    expected = int8(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = int8(x)
    assert got.dtype is torch.float32 and torch.equal(got, expected)


@pytest.mark.parametrize(
    "descriptors",
    [
        *(kind[0] for kind in KINDS),
        *({"input": D(bits, dynamic=True), "weight": D(bits, axis=0)} for bits in (8, (4, 3))),
    ],
    ids=["per token", "fp8", "weight-only", "per tensor", "fp8 per tensor"],
)
def test_exported_for_any_batch(descriptors: dict[str, torchq.QuantDescriptor]) -> None:
    x = torch.randn(5, 64)
    int8 = torchq.deploy(calibrated(nn.Linear(64, 16), x, config(**descriptors)))
    program = torch.export.export(
        int8, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},)
    ).module()
    for rows in (2, 5, MAX_ROWS + 1):
        x = torch.randn(rows, 64)
        assert torch.equal(program(x), int8(x))


@pytest.mark.parametrize(("descriptors", "layer"), KINDS, ids=["dynamic", "fp8", "weight-only"])
def test_chains_go_around_other_layers(
    descriptors: dict[str, torchq.QuantDescriptor], layer: type[nn.Module]
) -> None:
    integer = {"input": D(), "weight": D(axis=0)}
    rules = torchq.QuantConfig(
        (torchq.Rule(nn.Conv2d, **integer), torchq.Rule(nn.Linear, **descriptors))
    )  # type: ignore[arg-type]
    x = torch.randn(2, 3, 8, 8)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 16)
    )
    model = calibrated(network, x, rules)
    int8 = torchq.deploy(model, x)
    assert int8.get_submodule("0").output_qparams is not None
    assert isinstance(int8.get_submodule("4"), layer)
    assert {row.name for row in torchq.summary(int8).layers} >= {"0", "2", "4"}
    assert sqnr(int8(x), model(x)) > 38


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


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_products_of_8_bit_weights_are_as_exact_as_in_float32(scale: float) -> None:
    """Rows of any size, zeros and NaN beside each other."""
    torch.manual_seed(0)
    x = scale * torch.randn(4, 256)
    x[1], x[2, 7] = 0.0, float("nan")
    x[3] *= torch.logspace(-6, 0, 256)
    model = calibrated(nn.Linear(256, 32, bias=False), x[:1], config(weight=D(8, axis=0)))
    got, expected = torchq.deploy(model)(x), copy.deepcopy(model).double()(x.double())
    assert bool((got[1] == 0).all()) and bool(got[2].isnan().all())
    assert all(sqnr(got[row], expected[row]) > 110 for row in (0, 3))
