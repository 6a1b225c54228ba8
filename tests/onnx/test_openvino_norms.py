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


class Dense(nn.Module):
    """Layers that read the results of all before them through a BatchNorm, as in DenseNet."""

    def __init__(self, relu: bool = True, then: str = "") -> None:
        super().__init__()
        self.stem, self.then = nn.Conv2d(3, 16, 3), then
        self.norms = nn.ModuleList(nn.BatchNorm2d(16 + 8 * n) for n in (1, 2))
        self.act = nn.ReLU() if relu else nn.Identity()
        self.layers = nn.ModuleList(nn.Conv2d(16 + 8 * n, 8, 3, padding=1) for n in range(3))
        for norm in self.norms:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.stem(x).relu()
        parts = [x, self.layers[0](x)]
        for norm, layer in zip(self.norms, self.layers[1:], strict=True):
            joined = torch.cat(parts, 1)
            y = self.act(norm(joined))
            y = layer(y.sigmoid() if self.then == "sigmoid" else y)
            parts.append(y * joined.mean() if self.then == "shared" else y)
        return (parts[-1], joined) if self.then == "returned" else parts[-1]


def exported(model: nn.Module, x: Tensor, path: Path, dynamo: bool = False) -> nn.Module:
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
        dynamo=dynamo,
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


def kept(path: Path) -> int:
    """Return how many concatenations of a file are not quantized operand by operand."""
    nodes = nodes_of(load_model(path), "Max")
    return sum(computed_by(node.inputs[0], "Concat") is not None for node in nodes)


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


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("relu", [True, False])
def test_norms_of_small_concatenations_are_one_kernel(
    relu: bool, dynamo: bool, x: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    model = exported(Dense(relu).eval(), x, path, dynamo)
    assert kept(path) == 2
    for images in (x, x[:1], torch.cat([x, x], 3)):
        found, kinds = computed(path, images)
        # One reads the image, and two the concatenations; the rest is part of convolutions.
        assert kinds.count("Subgraph") <= 3
        assert sqnr(found, model(images)) > 30
        assert sqnr(found, run_file(path, images)[0]) > 30
    assert torchq.verify_onnx(model, path, [x]).ok


def test_norms_of_large_concatenations_are_many(tmp_path: Path) -> None:
    """The example decides, as the lengths are open."""
    path, x = tmp_path / "model.onnx", torch.randn(2, 3, 54, 55)
    exported(Dense().eval(), x, path)
    # 52 x 53 pixels: 66,144 elements in each of two parts, and 58,795 in each of three.
    assert kept(path) == 0
    exported(Dense().eval(), x[:1], path)
    assert kept(path) == 2
    exported(Dense().eval(), x[..., :50, :50], path)
    # 48 x 48 pixels: 55,296 elements in each of two parts, 49,152 in each of three.
    assert kept(path) == 1


@pytest.mark.parametrize(("then", "count"), [("sigmoid", 0), ("shared", 0), ("returned", 1)])
def test_other_concatenations_stay_as_they_are(
    then: str, count: int, x: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    exported(Dense(relu=False, then=then).eval(), x, path)
    assert kept(path) == count


def test_unknown_lengths_may_be_large(x: Tensor, tmp_path: Path) -> None:
    """A file with open lengths does not say how long those of the example were."""
    path, other = tmp_path / "model.onnx", tmp_path / "other.onnx"
    model = nn.Sequential(Dense(), torchq.nn.QuantIdentity()).eval()
    model = calibrated(model, x, target="onnxruntime", example=x)
    shapes = {"input": {2: "height", 3: "width"}}
    for opened, count in ((shapes, 0), ({}, 2)):
        torchq.export_onnx(
            model,
            x,
            path,
            target="onnxruntime",
            dynamo=False,
            dynamic_batch=bool(opened),
            dynamic_shapes=opened,
        )
        torchq.onnx.retarget_onnx(path, other, "openvino")
        assert kept(other) == count
