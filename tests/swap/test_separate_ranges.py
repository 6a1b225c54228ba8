"""Concatenated tensors with one range, or one for each."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.nn import Cat, QuantCat
from torchq.swap import Plan, plan_of


class Chain(nn.Module):
    """Layers whose results are concatenated with their input."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(12, 4, 1)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        near = self.first(x) * self.factor
        return self.last(torch.cat([x, near, self.second(near)], 1))


def chain(factor: float, target: str = "onnxruntime") -> tuple[Chain, Tensor]:
    """A quantized and calibrated chain, and its example."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 5, 5)
    model = Chain(factor).eval()
    torchq.quantize_(model, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    return model, x


def test_very_different_ranges_are_separate() -> None:
    model, _ = chain(0.01)
    assert isinstance(model.quant_cat, QuantCat)
    assert model.quant_cat.ranges == 3
    ranges = [float(model.quant_cat.quantizer_of(i).amax) for i in range(3)]
    assert ranges[0] > 20 * ranges[1]
    assert model.second.input_quantizer is model.quant_cat.quantizer_of(1)


class Branches(nn.Module):
    """Two layers of very different results that are concatenated alone, as in GoogLeNet."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.left = nn.Conv2d(4, 4, 1)
        self.right = nn.Conv2d(4, 4, 1)
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), self.right(x) * 0.01], 1)
        shuffled = (
            joined.view(2, 2, 4, 5, 5).transpose(1, 2).contiguous().view(2, 8, 5, 5)
        )
        return self.behind(shuffled.chunk(2, 1)[0])


@pytest.mark.parametrize(
    ("behind", "ranges"), [(nn.Conv2d(4, 4, 1), 1), (nn.Softmax(1), 2)]
)
def test_tensors_that_are_read_together_alone_share_the_range_of_the_next_layer(
    behind: nn.Module, ranges: int
) -> None:
    """Finer codes would be rounded again right away; in float they would count."""
    torch.manual_seed(0)
    model = Branches(behind).eval()
    torchq.quantize_(model, target="onnxruntime", example=torch.randn(2, 4, 5, 5))
    assert model.quant_cat.ranges == ranges


class Stem(nn.Module):
    """DenseNet's beginning: a result of a ReLU is pooled, and concatenated with one without."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 16, 1)
        self.second = nn.Conv2d(16, 16, 1)
        self.last = nn.Conv2d(32, 4, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat(self.parts(x), 1))

    def parts(self, x: Tensor) -> list[Tensor]:
        near = nn.functional.max_pool2d(self.first(x).relu(), 2)
        return [near, self.activation(self.second(near))]


@pytest.mark.filterwarnings("ignore:export_onnx")
@pytest.mark.parametrize(
    ("activation", "ranges"),
    [(nn.Identity(), 2), (nn.ReLU(), 1)],
)
def test_tensors_with_and_without_negative_values_are_separate(
    activation: nn.Module, ranges: int, tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    model = Stem(activation).eval()
    path = tmp_path / "m.onnx"
    with torch.no_grad():  # Both are equally large, so that the size does not decide.
        near, other = (part.abs().max() for part in model.parts(x))
        for parameter in model.second.parameters():
            parameter *= near / other
    torchq.quantize_(model, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    assert model.quant_cat.ranges == ranges
    torchq.export_onnx(
        model, x, path, target="onnxruntime", dynamo=False, progress=False
    )
    report = torchq.inspect_onnx(path)
    # The first convolution includes its ReLU, and the pooling reads its codes.
    assert report.counts["QLinearConv"] == 2
    assert "Relu" not in report.counts
    assert "FusedConv" not in report.counts
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "qnn"])
def test_other_targets_share_one_range(target: str) -> None:
    model, _ = chain(0.01, target)
    assert model.quant_cat.ranges == 1
    assert model.second.input_quantizer is model.quant_cat.input_quantizer


def test_deployed_concatenations_have_their_own_ranges() -> None:
    torch.manual_seed(0)
    model = Chain(0.01).eval()
    x = torch.randn(2, 4, 5, 5)
    config = torchq.recipes.int8(reduce_range=True)  # It overflows on no CPU.
    torchq.quantize_(model, config, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    expected = model(x)
    actual = torchq.deploy(model, x, target="torch")(x)
    assert (actual - expected).abs().max() <= 0.02 * expected.abs().max()


def test_a_damaged_number_of_ranges_is_named() -> None:
    model, _ = chain(0.01)
    data = plan_of(model).to_dict()
    row = next(row for row in data["decisions"] if row["names"] == ["quant_cat"])
    assert row["ranges"] == 3
    for damaged, expected in (
        *((9999, "a number from 1 to 256"), (0, "a number from 1 to 256")),
        *((True, "a whole number"), ("3", "a whole number")),
    ):
        row["ranges"] = damaged
        with pytest.raises(ConfigError, match=f"ranges: got .*; expected {expected}"):
            Plan.from_dict(data)


def test_a_tensor_behind_those_with_ranges_has_the_first_range() -> None:
    cat = torchq.nn.convert_(
        Cat(ranges=2),
        input=torchq.QuantDescriptor(),
    )
    assert cat.quantizer_of(2) is cat.input_quantizer
    assert cat.quantizer_of(1) is not cat.input_quantizer


class OwnQuantizer(nn.Module):
    """A quantizer that the author placed reads the tensor that a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.own = torchq.nn.TensorQuantizer()
        self.second = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.first(x))
        return self.second(x) + self.own(x)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt", "qnn"])
def test_a_quantizer_of_the_author_keeps_its_form(target: str) -> None:
    model = OwnQuantizer().eval()
    x = torch.randn(2, 3, 16, 16)
    plan = torchq.quantize_(model, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    assert model.own.descriptor == torchq.QuantDescriptor()
    assert not any("own" in group for group in plan.shared)
    assert any("second.input_quantizer" in group for group in plan.shared)
