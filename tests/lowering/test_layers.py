"""Each deployed layer against its simulation, and the reasons why others keep simulating."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import BITS, calibrated, sqnr
from torchq.lowering import DynamicInt8Linear, Int8Layer, Int8Linear
from torchq.lowering.kernel import MOST_SHAPES
from torchq.runtimes import Torch

LAYERS = [
    ("conv1d", nn.Conv1d(8, 16, 3, padding=1), (2, 8, 11)),
    ("conv2d", nn.Conv2d(8, 16, 3, stride=2, padding=1), (2, 8, 9, 9)),
    ("conv3d", nn.Conv3d(8, 16, 3, padding=1), (2, 8, 5, 6, 7)),
    ("depthwise", nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 9, 9)),
    ("dilated", nn.Conv2d(8, 16, 3, dilation=2, bias=False), (2, 8, 9, 9)),
    ("same", nn.Conv2d(8, 16, (5, 3), padding="same"), (2, 8, 9, 9)),
    ("valid", nn.Conv1d(8, 16, 3, padding="valid"), (2, 8, 9)),
    ("unbatched", nn.Conv2d(8, 16, 3), (8, 9, 9)),
    ("empty", nn.Conv2d(8, 16, 3), (0, 8, 9, 9)),
    ("linear", nn.Linear(24, 10), (3, 5, 24)),
    ("vector", nn.Linear(24, 10, bias=False), (24,)),
]


@pytest.mark.parametrize(
    ("layer", "shape"), [case[1:] for case in LAYERS], ids=[case[0] for case in LAYERS]
)
@pytest.mark.parametrize("positive", [False, True])
def test_a_layer_equals_its_simulation(
    layer: Any, shape: tuple[int, ...], positive: bool
) -> None:
    torch.manual_seed(0)  # a weight next to a tie has another code in float64
    layer.reset_parameters()
    x = torch.randn(shape).abs() if positive else torch.randn(shape)
    model = calibrated(
        copy.deepcopy(layer), x if x.numel() else torch.randn(2, *shape[1:])
    )
    int8 = torchq.deploy(model)
    assert isinstance(int8, Int8Layer)
    expected = copy.deepcopy(model).double()(x.double())
    got = int8(x)
    assert got.dtype is torch.float32
    # Integer sums are exact; float32 keeps 2**-24 of the largest partial sum, which a zero point
    # of 128 makes larger than the result.
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=2e-5)


FEW_BITS = torchq.Rule(
    nn.Linear,
    input=torchq.QuantDescriptor(4, unsigned=True),
    weight=torchq.QuantDescriptor(3, axis=0),
)


@pytest.mark.filterwarnings("ignore:.*got negative values")
@pytest.mark.parametrize(
    "config",
    [
        torchq.recipes.integer(BITS, 8, per_channel=False),
        torchq.QuantConfig((FEW_BITS,)),
    ],
    ids=["per tensor", "few bits"],
)
def test_other_grids(config: torchq.QuantConfig) -> None:
    x = torch.randn(4, 24)
    model = calibrated(nn.Linear(24, 10), x, config)
    torch.testing.assert_close(
        torchq.deploy(model)(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )


def test_dead_ranges_give_the_bias() -> None:
    model = calibrated(
        nn.Linear(4, 3),
        torch.zeros(2, 4),
    )
    assert torch.equal(
        torchq.deploy(model)(torch.randn(2, 4)),
        model.bias.expand(2, 3),
    )  # type: ignore[operator]


def test_a_scale_in_front_of_the_quantizer() -> None:
    x = torch.randn(4, 24)
    model = calibrated(nn.Linear(24, 10), x)
    model.input_quantizer.pre_quant_scale = torch.rand(24) + 0.5  # type: ignore[union-attr]
    torch.testing.assert_close(
        torchq.deploy(model)(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_results_have_the_models_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 5, 5).to(dtype)
    model = calibrated(
        nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3)).to(dtype), x
    )
    for fuse in (False, True):
        got = torchq.deploy(model, target=Torch(fuse=fuse))(x)
        assert got.dtype is dtype
        torch.testing.assert_close(
            got, model(x), rtol=0.05, atol=0.05
        )  # a code or two: 16-bit results are rounded again


D = torchq.QuantDescriptor
OFF = D((4, 3))  # FP8, as no integer kernel computes


def conv(*args: Any, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, *(args or (3,)), **options)


#: Why a layer keeps simulating: the layer, and the descriptors of its input and weight.
REASONS: list[tuple[str, nn.Module, torchq.QuantDescriptor | None, Any]] = [
    ("its input is not quantized", conv(), None, D(axis=0)),
    ("its weight is not quantized", conv(), D(), None),
    ("its padding differs at the two ends", conv((4, 3), padding="same"), D(), D()),
    (
        "its padding is not zeros but reflect",
        conv(1, padding=1, padding_mode="reflect"),
        D(),
        D(),
    ),
    (
        "no integer kernel for QuantConvTranspose2d",
        nn.ConvTranspose2d(4, 4, 3),
        D(),
        D(),
    ),
    ("no integer kernel for QuantEmbedding", nn.Embedding(4, 3), None, D(axis=0)),
    ("the range of its input is taken from each call", conv(), D(dynamic=True), D()),
    ("activations have more than one range", conv(), D(axis=1), D()),
    ("activations are rounded half_away", conv(), D(rounding="half_away"), D()),
    ("format e4m3 has no 8-bit integer kernel", conv(), OFF, OFF),
    ("weight format uint8 does not fit int8", nn.Linear(4, 4), D(), D(unsigned=True)),
    (
        "weight ranges are neither per tensor nor per output channel",
        *(nn.Linear(4, 4), D(), D(axis=1)),
    ),
    ("weight ranges are asymmetric", nn.Linear(4, 4), D(), D(symmetric=False)),
    (
        "a quantizer returns codes",
        nn.Linear(4, 4),
        D(dynamic=True),
        D(fake_quant=False),
    ),
    (
        "format e4m3 has no 8-bit integer kernel",
        nn.Linear(4, 4),
        D((4, 3), dynamic=True),
        D(),
    ),
    (
        "its dynamic input has blocks",
        nn.Linear(4, 4),
        D(dynamic=True, block_size=2),
        D(),
    ),
    (
        "its dynamic input has a range per feature",
        nn.Linear(4, 4),
        D(dynamic=True, axis=-1),
        D(),
    ),
    (
        "its input has an asymmetric range of each call",
        *(nn.Linear(4, 4), D(dynamic=True, symmetric=False), D()),
    ),
    (
        "its input has power-of-two scales or another rounding",
        *(nn.Linear(4, 4), D(dynamic=True, power_of_two=True), D()),
    ),
    ("weight format e4m3 does not fit int8", nn.Linear(4, 4), D(dynamic=True), OFF),
]


@pytest.mark.filterwarnings(
    "ignore:.*got negative values", "ignore:.*but the input is not"
)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(
    ("reason", "layer", "input", "weight"), REASONS, ids=lambda v: str(v)[:60]
)
def test_what_has_no_kernel_keeps_simulating_and_says_why(
    reason: str, layer: nn.Module, input: torchq.QuantDescriptor | None, weight: Any
) -> None:
    x = torch.arange(4) if isinstance(layer, nn.Embedding) else torch.randn(1, 4, 5, 5)
    x = torch.randn(1, 4) if isinstance(layer, nn.Linear) else x
    given = {"input": input, "weight": weight}
    rule = torchq.Rule(
        type(layer), **{name: d for name, d in given.items() if d is not None}
    )
    layer = copy.deepcopy(layer)
    # Made when this file was imported, it has other weights in each process.
    for part in layer.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    model = calibrated(
        nn.Sequential(layer),
        x,
        torchq.QuantConfig((rule,)),
    )
    int8 = torchq.deploy(model)
    torch.testing.assert_close(
        int8(x),
        model(x),
        rtol=1e-6,
        atol=1e-6,
    )
    (row,) = torchq.summary(int8).layers
    assert (row.kernel, row.note) == ("simulated", reason)


class OwnForward(torchq.nn.QuantLinear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Renamed(torchq.nn.QuantLinear):
    pass


def test_subclasses_are_lowered_unless_they_compute_something_else() -> None:
    x = torch.randn(3, 8)
    model = nn.Sequential(
        Renamed(8, 8), OwnForward(8, 8), torchq.nn.QuantLinear(8, 8)
    ).eval()
    model[2].forward = lambda input: torch.zeros(())  # type: ignore[method-assign]
    torchq.calibrate(model[:2], [x], progress=False)
    torchq.calibrate(
        model[2],
        [x],
        progress=False,
        on_unseen="disable",
    )
    int8 = torchq.deploy(model, target=Torch(fuse=False))
    assert [type(layer) for layer in int8.children()] == [
        Int8Linear,
        OwnForward,
        torchq.nn.QuantLinear,
    ]
    assert [row.note for row in torchq.summary(int8).layers][1:] == [
        "OwnForward has a forward of its own",
        "QuantLinear has a forward of its own",
    ]


@pytest.mark.eight_bit_products
def test_layers_of_the_compatibility_package_are_lowered() -> None:
    legacy = pytest.importorskip("torchq.compat.pytorch_quantization.nn")
    x = torch.randn(2, 8, 6, 6)
    model = nn.Sequential(
        legacy.QuantConv2d(8, 4, 3), nn.Flatten(), legacy.QuantLinear(64, 5)
    ).eval()
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x)
    assert sum(isinstance(m, Int8Layer) for m in int8.modules()) == 2


def test_many_image_sizes_keep_a_few_kernels() -> None:
    layer = torchq.deploy(
        calibrated(nn.Conv2d(3, 4, 3, padding=1), torch.randn(2, 3, 8, 8)),
        target=Torch(fuse=False),
    )
    images = [torch.randn(2, 3, 8, 8 + i) for i in range(MOST_SHAPES + 4)]
    first = [layer(x) for x in images]
    assert all(torch.equal(layer(x), y) for x, y in zip(images, first, strict=True))
    assert 0 < len(layer._runs) <= MOST_SHAPES  # type: ignore[arg-type]
    assert torch.equal(
        layer(images[0][0]),
        first[0][0],
    )


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
    model = calibrated(
        nn.Linear(64, 32).to(dtype), x, config(input=descriptor, weight=D(BITS, axis=0))
    )
    int8 = torchq.deploy(model)
    assert isinstance(int8, DynamicInt8Linear)
    assert sqnr(int8(x), model(x)) > (90 if dtype is torch.float32 else 38)


PER_TOKEN = {"input": D(dynamic=True, axis=0), "weight": D(BITS, axis=0)}


@pytest.mark.parametrize("rows", [2, 17])
def test_autocast_changes_nothing(rows: int) -> None:
    x = torch.randn(rows, 64)
    int8 = torchq.deploy(calibrated(nn.Linear(64, 16), x, config(**PER_TOKEN)))
    expected = int8(x)
    with torch.autocast("cpu", torch.bfloat16):
        got = int8(x)
    assert got.dtype is torch.float32
    assert torch.equal(got, expected)


def test_dynamic_ranges_along_features_are_refused() -> None:
    x = torch.randn(3, 64)
    model = calibrated(
        nn.Linear(64, 32),
        x,
        config(input=D(dynamic=True, axis=1), weight=D(BITS, axis=0)),
    )
    message = (
        r"got ranges along the features of \(3, 64\); expected one per token or tensor"
    )
    with pytest.raises(torchq.errors.ExportError, match=message):
        torchq.deploy(model)(x)
