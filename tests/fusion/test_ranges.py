"""The diagnosis of ranges names the layer that suffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from torchq.fusion import diagnose_ranges, fuse_


def test_spread_is_largest_over_median_channel() -> None:
    layer = nn.Conv2d(1, 5, 1)
    layer.weight.data = torch.tensor([1.0, -2.0, 4.0, 32.0, 0.0]).reshape(
        5, 1, 1, 1
    )  # an empty channel does not count
    (row,) = diagnose_ranges(nn.Sequential(layer)).layers
    assert row.spread == 16.0  # torch's median of 1, 2, 4, 32 is the lower middle
    assert row.lost_bits == 4.0
    assert row.outliers is None


def test_peak_is_largest_over_usual_weight_of_a_channel() -> None:
    layer = nn.Conv1d(4, 3, 4, bias=False)
    layer.weight.data = torch.ones(3, 4, 4)  # 16 weights in each channel
    layer.weight.data[1, 0, 0] = 7.0  # root mean square of 15 ones and a seven is 2
    layer.weight.data[2, 0, 0] = 7.0
    (row,) = diagnose_ranges(nn.Sequential(layer)).layers
    assert row.peak == 3.5
    layer.weight.data.zero_()
    assert diagnose_ranges(nn.Sequential(layer)).layers[0].peak == 1.0


def test_channels_of_a_transposed_convolution_are_on_its_second_axis() -> None:
    layer = nn.ConvTranspose1d(4, 6, 1, groups=2)
    layer.weight.data = torch.ones(4, 3, 1)
    layer.weight.data[3, 1] = 8.0  # output channel 4
    assert diagnose_ranges(nn.Sequential(layer)).worst.spread == 8.0


def test_outliers_of_the_input() -> None:
    layer = nn.Linear(1000, 1)
    x = torch.ones(2, 1000)
    x[0, 0] = 50.0
    report = diagnose_ranges(nn.Sequential(layer), x)
    assert report.layers[0].outliers == pytest.approx(50.0)
    assert "outliers" in str(report)
    assert (
        "Input outliers in 1 layers, up to 50.0 times the 99.9th percentile (0)"
        in report.compare(report)
    )


def test_fusing_a_repvgg_shows_what_happens_to_its_ranges() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(RepVGGBlock(32, 32)).eval()
    model[0].rbr_identity.running_var[3] = (
        1e-4  # a nearly dead channel gets a large identity weight
    )
    before = diagnose_ranges(model)
    report = fuse_(model)
    after = diagnose_ranges(model)
    assert after.worst.name == "0.rbr_reparam"
    assert after.worst.spread > 20 > before.worst.spread
    text = before.compare(after)
    assert "worst weight spread" in text
    assert "of 8 bits: use one per channel" in text
    assert "a merged identity is one large tap; 8 bits bear it, 4 bits do not" in text
    assert report.fused[0].spread_after == pytest.approx(after.worst.spread, rel=1e-5)


def test_a_model_without_layers() -> None:
    report = diagnose_ranges(nn.Sequential(nn.ReLU()))
    assert report.worst is None
    assert report.compare(report) == "no layers to compare"
