"""A forward that takes another way while it is exported: its file would compute something else."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import ExportError

pytest.importorskip("onnxruntime")


def _quantized(
    model: nn.Module, x: Tensor, exclude: list[str] | None = None
) -> nn.Module:
    torchq.quantize_(
        model.eval(), target="onnxruntime", example=x, exclude=exclude or []
    )
    torchq.calibrate(model, [x], progress=False)
    return model


class Pyramid(nn.Module):
    """Pools that an export writes as a resize of the same numbers, joined with what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.pools = nn.ModuleList([nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d(2)])
        self.layers = nn.ModuleList([nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)])
        self.last = nn.Sequential(nn.Conv2d(16, 4, 1), torchq.nn.QuantIdentity())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        found = []
        for pool, layer in zip(self.pools, self.layers, strict=True):
            if torch.onnx.is_in_onnx_export():
                size = pool.output_size
                pooled = F.interpolate(x, size=(size, size), mode="area")
            else:
                pooled = pool(x)
            found.append(F.interpolate(layer(pooled).relu(), size=x.shape[2:]))
        return self.last(torch.cat([*found, x], 1))


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_quantizer_that_a_trace_does_not_call_is_an_error(
    tmp_path, dynamo: bool
) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = _quantized(Pyramid(), x)
    expected = (
        r"got \d calls in a run of the model that torch's trace lacks, and 0 in .* around "
        r"pools\.0, pools\.1 takes another way .*exclude=\['pools\.0', 'pools\.1'\]"
    )
    with pytest.raises(ExportError, match=expected):
        torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=dynamo, progress=False)
    assert not list(tmp_path.iterdir())


def test_a_file_agrees_where_the_other_way_is_left_in_float(tmp_path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = _quantized(Pyramid(), x, exclude=["pools.0", "pools.1"])
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


class OneCallMore(nn.Module):
    """A layer that is called once more while it is exported."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if torch.onnx.is_in_onnx_export():
            x = self.layer(x).relu()
        return self.layer(self.layer(x))


def test_a_quantizer_that_a_trace_calls_once_more_is_an_error(tmp_path) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = _quantized(OneCallMore(), x)
    expected = r"layer\.input_quantizer: got 0 calls .* and 1 in the trace alone; .*\['layer'\]"
    with pytest.raises(ExportError, match=expected):
        torchq.export_onnx(model, x, tmp_path / "m.onnx", progress=False)


class WithSideBranch(nn.Module):
    """A layer whose result nothing reads is called in a run alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.side = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.codes = torchq.nn.QuantIdentity()
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not torch.onnx.is_in_onnx_export():
            self.loss = self.side(x * 2).square().mean()
        return self.codes(self.layer(x))


def test_a_call_that_nothing_reads_may_be_missing(tmp_path) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = _quantized(WithSideBranch(), x)
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
