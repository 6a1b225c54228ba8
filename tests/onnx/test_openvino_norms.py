"""Norms over the last dimension of images in files for OpenVINO."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import sqnr
from tests.onnx.exported import calibrated, run_file
from torchq.onnx.ir import computed_by, load_model, nodes_of

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
openvino = pytest.importorskip("openvino")


class Block(nn.Module):
    """A convolution, a norm of its channels, which come last, and a linear layer or nothing."""

    def __init__(self, shape: tuple[int, ...] = (16,), head: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 16, 3), nn.LayerNorm(shape)
        self.linear = nn.Linear(16, 8) if head else nn.Identity()
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1)))


@pytest.fixture
def x() -> Tensor:
    """Return two small images."""
    return torch.randn(2, 3, 10, 12, generator=torch.Generator().manual_seed(0))


def exported(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """Quantize a model, with weights that overflow on no CPU, and export it with open lengths."""
    torch.manual_seed(0)
    config = torchq.recipes.int8(reduce_range=True)
    model = calibrated(model, x, config=config, target="openvino", example=x)
    shapes = {"x": {2: "height", 3: "width"}}
    torchq.export_onnx(
        model,
        x,
        path,
        target="openvino",
        dynamo=False,
        dynamic_batch=True,
        dynamic_shapes=shapes,
    )
    return model


def computed(path: Path, x: Tensor) -> tuple[Tensor, list[str]]:
    """Return what OpenVINO computes for images of one size, and the kinds of its kernels."""
    core = openvino.Core()
    model = core.read_model(str(path))
    model.reshape(list(x.shape))
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = core.compile_model(model, "CPU", settings)
    nodes = (node.get_rt_info() for node in compiled.get_runtime_model().get_ops())
    kinds = [str(info["layerType"].value) for info in nodes]
    return torch.from_numpy(compiled([x.numpy()])[0].copy()), kinds


@pytest.mark.parametrize("head", [True, False], ids=["a layer", "the result"])
def test_norms_of_images_are_one_kernel(head: bool, x: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = exported(Block(head=head).eval(), x, path)
    (norm,) = nodes_of(load_model(path), "LayerNormalization")
    assert computed_by(norm.inputs[0], "Reshape") is not None
    for images in (x, x[:1], torch.cat([x, x], 3)):
        found, kinds = computed(path, images)
        assert kinds.count("MVN") == 1 and "ReduceMean" not in kinds
        # Sums of floats in another order, and codes that fall the other way.
        assert sqnr(found, model(images)) > 35
        assert sqnr(found, run_file(path, images)[0]) > 35
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.parametrize(
    "model", [Block((10, 16)), nn.Sequential(nn.Linear(10, 16), nn.LayerNorm(16))]
)
def test_other_norms_stay_as_they_are(model: nn.Module, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 10, 12) if isinstance(model, Block) else torch.randn(2, 5, 10)
    path = tmp_path / "model.onnx"
    model = calibrated(model.eval(), x, target="openvino", example=x)
    torchq.export_onnx(model, x, path, target="openvino", dynamo=False)
    (norm,) = nodes_of(load_model(path), "LayerNormalization")
    assert computed_by(norm.inputs[0], "Reshape") is None
