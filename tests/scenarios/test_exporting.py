"""Scenarios of exporting to ONNX Runtime.

S29 to S31 and parts of S32 to S34 have tests in tests/fusion and tests/onnx.
"""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq
from tests.models import simulated
from tests.onnx.exported import ends, run_file
from tests.rank_processes import needs_gloo
from torchq.errors import ExportError

X = torch.randn(4, 8, 9, 9, generator=torch.Generator().manual_seed(0))


def test_s07_a_quantizer_on_a_residual_is_in_the_file(tmp_path: Path) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 3, padding=1)
            self.residual = torchq.TensorQuantizer(torchq.QuantDescriptor(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x).relu() + self.residual(x)

    model = simulated(Residual().eval(), [X])
    torchq.export_onnx(model, X, tmp_path / "m.onnx")
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        assert "residual" in ends(tmp_path / "m.onnx", kind)


class Join(nn.Module):
    """A residual addition of quantized operands and a concatenation with one range."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Conv2d(8, 8, 1)
        self.add = torchq.nn.QuantAdd()
        self.cat = torchq.nn.QuantCat()

    def forward(self, x: Tensor) -> Tensor:
        y = self.add(self.left(x), x)
        out: Tensor = self.cat([y, 3 * self.right(y)])
        return out


@pytest.fixture
def joined() -> Join:
    pytest.importorskip("onnxruntime")
    return simulated(Join().eval(), [X])


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
    actual = run_file(path, other)[0]
    assert float((torch.as_tensor(actual) - expected).abs().max()) < 1.01 * scale
    twin = copy.deepcopy(joined)
    twin.load_state_dict(joined.state_dict())
    assert torch.equal(twin(other), expected)


def test_s34_an_opset_without_scales_per_channel_is_named(
    joined: Join, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="13"):
        torchq.export_onnx(joined, X, tmp_path / "m.onnx", dynamo=False, opset=10)
    joined.left.input_quantizer.forget_amax()
    with pytest.raises(ExportError, match=r"left\.input_quantizer"):
        torchq.export_onnx(joined, X, tmp_path / "m.onnx")


def test_s35_a_model_in_training_is_exported_in_eval_mode(
    joined: Join, tmp_path: Path
) -> None:
    wrapped = nn.DataParallel(joined.train())
    torchq.export_onnx(wrapped, X, tmp_path / "m.onnx", dynamo=False)
    assert joined.training
    assert all(p.requires_grad for p in joined.parameters())
    path = str(tmp_path / "m.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that its TorchScript is old.
        torch.jit.save(torch.jit.trace(joined.eval(), X), path)
        torch.testing.assert_close(
            torch.jit.load(path)(X),
            joined(X),
        )


@needs_gloo
def test_s35_a_model_under_ddp_is_exported_as_itself(
    joined: Join, tmp_path: Path
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(joined)
        torchq.export_onnx(wrapped, X, tmp_path / "m.onnx")
    finally:
        dist.destroy_process_group()
    assert "left.input_quantizer" in ends(tmp_path / "m.onnx", "QuantizeLinear")
