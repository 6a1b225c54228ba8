"""Scenarios of fusing, and of exporting to ONNX Runtime.

Parts of S29 to S34 have tests of their own in tests/fusion and tests/onnx.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq
from tests.onnx.exported import ends, run_file
from tests.rank_processes import needs_gloo
from torchq.errors import ExportError

X = torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(0))

LAYERS: dict[str, tuple[nn.Module, nn.Module, tuple[int, ...]]] = {
    "no bias": (nn.Conv2d(8, 4, 3, bias=False), nn.BatchNorm2d(4), (4, 8, 9, 9)),
    "groups": (nn.Conv2d(8, 4, 3, groups=2), nn.BatchNorm2d(4, affine=False), (4, 8, 9, 9)),
    "transposed": (nn.ConvTranspose2d(8, 4, 3, groups=2), nn.BatchNorm2d(4), (4, 8, 9, 9)),
    "1d": (nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), (4, 8, 9)),
    "3d": (nn.Conv3d(8, 4, 3), nn.BatchNorm3d(4), (4, 8, 5, 5, 5)),
    "linear": (nn.Linear(8, 4), nn.BatchNorm1d(4), (4, 8)),
}


def with_statistics(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for name, tensor in [*norm.named_buffers(), *norm.named_parameters()]:
        if tensor.is_floating_point():
            values = torch.rand(tensor.shape, generator=generator)
            tensor.data.copy_(values + 0.5 if "var" in name else 2 * values - 1)
    return norm


@pytest.mark.parametrize("name", LAYERS)
def test_s29_batchnorm_folds_into_every_layer(name: str) -> None:
    layer, norm, shape = LAYERS[name]
    model = nn.Sequential(copy.deepcopy(layer), with_statistics(copy.deepcopy(norm)))
    model, x = model.double().eval(), torch.randn(shape, dtype=torch.float64)
    expected = model(x)
    assert len(torchq.fuse_(model, x).fused) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
    assert not torchq.fuse_(model, x).fused


def test_s29_what_cannot_be_folded_is_refused() -> None:
    batch_statistics = nn.Sequential(
        nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)
    )
    assert not torchq.fuse_(batch_statistics.eval()).fused
    norm = nn.BatchNorm2d(8)
    shared = nn.Sequential(nn.Conv2d(8, 8, 1), norm, nn.Conv2d(8, 8, 1), norm).eval()
    expected = shared(X)
    torchq.fuse_(shared)
    torch.testing.assert_close(shared(X), expected)


def test_s30_folding_into_a_calibrated_layer_keeps_its_codes() -> None:
    model = nn.Sequential(nn.Conv2d(8, 4, 3), with_statistics(nn.BatchNorm2d(4))).eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [X], progress=False)
    before: Any = copy.deepcopy(model)
    torchq.fuse_(model)
    after: Any = model[0]
    factor = before[1].weight / (before[1].running_var + before[1].eps).sqrt()
    assert bool((factor < 0).any())
    amax = before[0].weight_quantizer.amax.flatten()
    torch.testing.assert_close(after.weight_quantizer.amax.flatten(), amax * factor.abs())

    def codes(conv: Any) -> Tensor:
        scale = conv.weight_quantizer.amax.reshape(-1, 1, 1, 1) / 127
        rounded: Tensor = (conv.weight / scale).round()
        return rounded

    signs = factor.sign().reshape(-1, 1, 1, 1)
    # The product with the factor is rounded once, which moves only values at a tie.
    assert float((codes(after) != signs * codes(before[0])).float().mean()) <= 1e-4


class Block(nn.Module):
    """The block of RepVGG, under the names of the original code."""

    def __init__(self, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        settings = {"stride": stride, "groups": groups, "bias": False}
        dense, point = nn.Conv2d(8, 8, 3, padding=1, **settings), nn.Conv2d(8, 8, 1, **settings)
        self.nonlinearity = nn.ReLU()
        self.rbr_identity = nn.BatchNorm2d(8) if stride == 1 else None
        self.rbr_dense = nn.Sequential(OrderedDict(conv=dense, bn=nn.BatchNorm2d(8)))
        self.rbr_1x1 = nn.Sequential(OrderedDict(conv=point, bn=nn.BatchNorm2d(8)))

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "rbr_reparam"):
            return self.nonlinearity(self.rbr_reparam(x))
        identity = 0 if self.rbr_identity is None else self.rbr_identity(x)
        return self.nonlinearity(self.rbr_dense(x) + self.rbr_1x1(x) + identity)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_s31_branches_become_one_convolution(stride: int, groups: int) -> None:
    model = nn.Sequential(Block(stride, groups)).eval()
    for module in list(model.modules()):
        if isinstance(module, nn.BatchNorm2d):
            with_statistics(module)
    expected = model(X)
    torchq.fuse_(model, X)
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 1
    torch.testing.assert_close(model(X), expected, rtol=1e-5, atol=1e-5)
    report = torchq.quantize_(model)
    assert len(report.replaced) == 1


def test_s07_a_quantizer_on_a_residual_is_in_the_file(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.residual = torchq.TensorQuantizer(torchq.QuantDescriptor(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu() + self.residual(x)

    model = Residual().eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [X], progress=False)
    torchq.export_onnx(model, X, tmp_path / "m.onnx")
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        assert "residual" in ends(tmp_path / "m.onnx", kind)


class Join(nn.Module):
    """A residual addition of quantized operands and a concatenation with one range."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)
        self.add, self.cat = torchq.nn.QuantAdd(), torchq.nn.QuantCat()

    def forward(self, x: Tensor) -> Tensor:
        y = self.add(self.left(x), x)
        out: Tensor = self.cat([y, 3 * self.right(y)])
        return out


@pytest.fixture
def joined() -> Join:
    pytest.importorskip("onnxruntime")
    model = Join().eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [X], progress=False)
    return model


def scales_before(path: Path, kind: str) -> list[float]:
    """Return the scales of the DequantizeLinear nodes that feed the first node of a kind."""
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    made = {output: node for node in graph.node for output in node.output}
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    node = next(node for node in graph.node if node.op_type == kind)
    sources = [made[name] for name in node.input]
    assert {source.op_type for source in sources} == {"DequantizeLinear"}
    return [float(values[source.input[1]]) for source in sources]


def test_s32_s33_s37_the_file_computes_what_the_simulation_does(
    joined: Join, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torchq.export_onnx(joined, X, path, dynamo=False, opset=13)
    import onnx

    onnx.checker.check_model(onnx.load(str(path)), full_check=True)
    assert len(set(scales_before(path, "Concat"))) == 1
    assert len(scales_before(path, "Add")) == 2
    other = torch.randn(3, 8, 9, 9)
    expected = joined(other).detach()
    scale = float(joined.cat.input_quantizer.amax) / 127
    found = run_file(path, other)[0]
    assert float((torch.as_tensor(found) - expected).abs().max()) < 1.01 * scale
    twin = copy.deepcopy(joined)
    twin.load_state_dict(joined.state_dict())
    assert torch.equal(twin(other), expected)


def test_s34_an_opset_without_scales_per_channel_is_named(joined: Join, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="13"):
        torchq.export_onnx(joined, X, tmp_path / "m.onnx", dynamo=False, opset=10)
    joined.left.input_quantizer.forget_amax()
    with pytest.raises(ExportError, match=r"left\.input_quantizer"):
        torchq.export_onnx(joined, X, tmp_path / "m.onnx")


def test_s35_a_model_in_training_is_exported_in_eval_mode(joined: Join, tmp_path: Path) -> None:
    wrapped = nn.DataParallel(joined.train())
    torchq.export_onnx(wrapped, X, tmp_path / "m.onnx", dynamo=False)
    assert joined.training and all(p.requires_grad for p in joined.parameters())
    path = str(tmp_path / "m.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its TorchScript is old.
        torch.jit.save(torch.jit.trace(joined.eval(), X), path)
        torch.testing.assert_close(torch.jit.load(path)(X), joined(X))


@needs_gloo
def test_s35_a_model_under_ddp_is_exported_as_itself(joined: Join, tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(joined)
        torchq.export_onnx(wrapped, X, tmp_path / "m.onnx")
    finally:
        dist.destroy_process_group()
    assert "left.input_quantizer" in ends(tmp_path / "m.onnx", "QuantizeLinear")


@pytest.mark.parametrize("groups", [1, 2])
def test_s36_transposed_convolutions_take_output_sizes(groups: int) -> None:
    layer = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, groups=groups)
    expected = layer(X), layer(X, output_size=(19, 19))
    model = nn.Sequential(layer)
    torchq.quantize_(model)
    with torchq.disabled(model):
        assert torch.equal(model[0](X), expected[0])
        assert torch.equal(model[0](X, output_size=(19, 19)), expected[1])
