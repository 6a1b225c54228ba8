"""Average and max pooling of codes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from torchq.lowering import QParams
from torchq.lowering.codes import CodesAvgPool2d, Dequantize, Quantize
from torchq.lowering.operators import max_pool2d

SIGNED, UNSIGNED, NARROW = (
    QParams(0.02, 128, 0, 255),
    QParams(0.013, 0, 0, 255),
    QParams(0.017, 0, 0, 127),
)
POOLS = [
    nn.AdaptiveAvgPool2d(1),
    nn.AdaptiveAvgPool2d((2, 4)),
    nn.AdaptiveAvgPool2d((None, 1)),
    nn.AdaptiveAvgPool2d(5),  # windows of different sizes
    nn.AvgPool2d(2),
    nn.AvgPool2d(3, stride=2, padding=1),
    nn.AvgPool2d((2, 3), stride=(1, 2), padding=(1, 0)),
    nn.AvgPool2d(3, padding=1, count_include_pad=False),
    nn.AvgPool2d(3, ceil_mode=True),
    nn.AvgPool2d(2, divisor_override=3),
]


def codes_of(shape: tuple[int, ...], qparams: QParams) -> Tensor:
    codes = torch.randint(qparams.quant_min, qparams.quant_max + 1, shape, dtype=torch.uint8)
    return codes.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else codes


@pytest.mark.parametrize("pool", POOLS, ids=str)
@pytest.mark.parametrize(
    ("before", "after"),
    [(SIGNED, SIGNED), (UNSIGNED, NARROW), (SIGNED, UNSIGNED), (NARROW, SIGNED)],
)
@pytest.mark.parametrize("shape", [(3, 20, 8, 8), (1, 5, 4, 8), (8, 6, 8), (0, 4, 8, 8)])
def test_codes_are_averaged_like_values(
    pool: nn.Module, before: QParams, after: QParams, shape: tuple[int, ...]
) -> None:
    layer, codes = CodesAvgPool2d(pool, before, after), codes_of(shape, before)
    exact = pool(before.dequantize(codes).double()) / after.scale
    got = layer(codes)
    assert got.dtype is torch.uint8 and got.shape == exact.shape
    expected = exact.round().add(after.zero_point).clamp(after.quant_min, after.quant_max)
    # Sums of up to 64 codes in float32: next to a tie either neighbour is right.
    near_a_tie = (exact - exact.floor() - 0.5).abs() < 1e-4
    assert bool(((got == expected) | (((got - expected).abs() <= 1) & near_a_tie)).all())


class Squeeze(nn.Module):
    """A squeeze-and-excitation block as networks write it, with the pooling as ``pool``."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.stem, self.conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU()), nn.Conv2d(16, 16, 1)
        self.pool, self.kind = nn.AdaptiveAvgPool2d(1) if pool == "module" else None, pool

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.kind == "module":
            return self.conv(self.pool(x))
        if self.kind == "function":
            return self.conv(nn.functional.adaptive_avg_pool2d(x, output_size=1))
        return self.conv(nn.functional.avg_pool2d(x, 2, count_include_pad=True))


@pytest.mark.parametrize("pool", ["module", "function", "window"])
def test_a_network_averages_codes(pool: str) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), Squeeze(pool)).eval(), torch.randn(4, 3, 10, 10)
    torchq.quantize_(model, target="tensorrt")
    model[1].stem.append(torchq.TensorQuantizer())  # its values are on a qparams
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x)
    kinds = [type(m) for m in int8.modules()]
    assert (
        kinds.count(CodesAvgPool2d) == 1
        and kinds.count(Dequantize) == 0
        and kinds.count(Quantize) == 1
    )
    assert sqnr(int8(x), model(x)) > 40
    for twin in (copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
        assert torch.equal(twin(x), int8(x))
    assert torch.equal(torch.compile(int8, fullgraph=True, backend="eager")(x), int8(x))


def test_grids_are_part_of_the_state() -> None:
    a, b = (
        CodesAvgPool2d(nn.AvgPool2d(2), SIGNED, NARROW),
        CodesAvgPool2d(nn.AvgPool2d(2), UNSIGNED, UNSIGNED),
    )
    codes = codes_of((1, 4, 4, 4), SIGNED)
    b(codes)
    b.load_state_dict(a.state_dict())
    assert (b.input_qparams, b.output_qparams) == (SIGNED, NARROW) and torch.equal(
        a(codes), b(codes)
    )


@pytest.mark.parametrize("shape", [(2, 5, 9, 9), (1, 24, 7, 8), (1, 32, 6, 6), (1, 40, 8, 8)])
@pytest.mark.parametrize("window", [(3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 0, 2)])
def test_codes_of_any_number_of_channels_are_pooled_as_values(
    shape: tuple[int, ...], window: tuple[int, int, int, int]
) -> None:
    """The kernel gets padded channels; none of them may be seen."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8)
    codes = codes.contiguous(memory_format=torch.channels_last)
    kernel, stride, padding, dilation = window
    found = max_pool2d(codes, [(n, n) for n in window], False)
    expected = nn.functional.max_pool2d(codes.float(), kernel, stride, padding, dilation)
    assert torch.equal(found.float(), expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
