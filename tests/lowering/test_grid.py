from __future__ import annotations

import pytest
import torch

import torchq
from torchq.lowering import QParams

DESCRIPTORS = [
    torchq.QuantDescriptor(8),
    torchq.QuantDescriptor(8, narrow_range=True),
    torchq.QuantDescriptor(8, unsigned=True),
    torchq.QuantDescriptor(5),
    torchq.QuantDescriptor(4, unsigned=True),
    torchq.QuantDescriptor(8, scale_amax=0.5),
]


def grid_of(
    descriptor: torchq.QuantDescriptor, amax: float
) -> tuple[QParams, torchq.TensorQuantizer]:
    quantizer = torchq.TensorQuantizer(descriptor)
    quantizer.set_amax(amax)
    qparams = QParams.of(quantizer)
    assert isinstance(qparams, QParams)
    return qparams, quantizer


@pytest.mark.parametrize("descriptor", DESCRIPTORS, ids=str)
@pytest.mark.parametrize("amax", [1.0, 0.37, 250.0, 2.0**-24])
def test_codes_are_those_of_the_simulation(descriptor: torchq.QuantDescriptor, amax: float) -> None:
    qparams, quantizer = grid_of(descriptor, amax)
    # Between the ties: at a tie x / scale and x * (1 / scale) may round to different sides.
    codes = torch.arange(-300, 301).float()
    x = torch.cat([(codes + offset) * qparams.scale for offset in (0.0, 0.3, -0.3, 0.49)])
    if amax > 2.0**-24:
        x = torch.cat([x, torch.tensor([-torch.inf, torch.inf])])
    assert torch.equal(qparams.dequantize(qparams.quantize(x)), quantizer(x))
    assert qparams.quantize(x).dtype is torch.uint8


def test_ties_go_to_even() -> None:
    qparams, _ = grid_of(torchq.QuantDescriptor(8), 127.0)
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert qparams.quantize(x).tolist() == [128, 130, 130, 128, 126, 126]


@pytest.mark.parametrize(
    "bounds", [(0.0, float("inf")), (0.0, 6.0), (-1.0, 1.0), (0.25, 0.5), (2.0, 1e9), (-1e9, -2.0)]
)
@pytest.mark.parametrize("keep_zero", [False, True])
def test_clamping_before_and_after_rounding_agree(
    bounds: tuple[float, float], keep_zero: bool
) -> None:
    qparams, _ = grid_of(torchq.QuantDescriptor(8), 1.0)
    clamped = qparams.clamped(*bounds, keep_zero=keep_zero)
    x = torch.linspace(-3, 3, 997)
    assert torch.equal(
        clamped.dequantize(clamped.quantize(x)),
        qparams.dequantize(qparams.quantize(x.clamp(*bounds))),
    )
    assert clamped.zero_point == (0 if bounds[0] >= 0 and not keep_zero else 128)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_layout_and_dtype(format: torch.memory_format, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5, dtype=dtype).contiguous(memory_format=format)
    codes = QParams(0.01, 128, 0, 255).quantize(x)
    assert codes.is_contiguous(memory_format=format)
    assert codes.shape == x.shape


@pytest.mark.parametrize(
    ("descriptor", "reason"),
    [
        (torchq.QuantDescriptor((4, 3), amax=1.0), "format e4m3 has no 8-bit integer kernel"),
        (torchq.QuantDescriptor(12, amax=1.0), "format int12 has no 8-bit integer kernel"),
        (
            torchq.QuantDescriptor(8, axis=0, amax=[1.0, 2.0]),
            "activations have more than one range",
        ),
    ],
)
def test_what_has_no_grid_says_why(descriptor: torchq.QuantDescriptor, reason: str) -> None:
    assert QParams.of(torchq.TensorQuantizer(descriptor)) == reason
