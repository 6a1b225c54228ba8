"""Results of convolutions that only a quantizer of their own quantizes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import QuantizationError
from torchq.nn import TensorQuantizer
from torchq.onnx.ir import load_model, nodes_of
from torchq.onnx.qdq import pair_name, read_record


class Readers(nn.Module):
    """Convolutions whose results are read by a norm, a GELU, a factor behind a ReLU, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.deep = nn.Conv2d(8, 8, 3)
        self.gated = nn.Conv2d(8, 8, 1)
        self.scaled = nn.Conv2d(8, 8, 1)
        self.factor = nn.Parameter(torch.rand(8, 1, 1) + 0.5)
        self.gamma = nn.Parameter(torch.rand(8))
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.stem(x).relu())
        x = F.layer_norm(x.permute(0, 2, 3, 1), (8,)).permute(0, 3, 1, 2)
        x = self.factor * F.relu(self.gated(x))
        x = self.scaled(x).mul(self.gamma.reshape(1, -1, 1, 1))
        return self.head(x)


def quantized(
    model: nn.Module, x: Tensor, target: str = "onnxruntime"
) -> torchq.swap.Plan:
    """Quantize and calibrate the model, in place."""
    report = torchq.quantize_(model, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    return report


def outputs(model: nn.Module) -> dict[str, bool]:
    """Path of each layer with a quantizer of its result -> its codes begin at 0."""
    actual = {}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer) and name.endswith("output_quantizer"):
            d = module.descriptor
            actual[name.removesuffix(".output_quantizer")] = d.unsigned and d.symmetric
    return actual


def test_results_that_nothing_quantizes_get_a_quantizer() -> None:
    """One in front of a stored factor too: no integer kernel has both."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    model = Readers().eval()
    report = quantized(model, x)
    assert outputs(model) == {"deep": False, "gated": True, "scaled": False}
    assert {d.name for d in report.replaced if d.output is not None} == {
        "deep",
        "gated",
        "scaled",
    }
    assert "output uint8" in str(report)


def test_depthwise_results_in_front_of_a_norm_stay_float() -> None:
    x = torch.randn(2, 3, 9, 9)
    model = Readers().eval()
    model.deep = nn.Conv2d(8, 8, 3, groups=8)
    quantized(model, x)
    assert outputs(model) == {"gated": True, "scaled": False}


def test_an_unsigned_result_is_that_of_the_relu() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 5)
    model = Readers().eval()
    quantized(model, torch.randn(2, 3, 9, 9))
    result = model.gated(x)
    quantizer = model.gated.output_quantizer
    del model.gated.output_quantizer
    assert torch.equal(result, quantizer(model.gated(x).relu()))
    assert bool((result == 0).any())
    assert not bool((result < 0).any())


def test_what_is_left_of_a_fused_norm_does_not_hide_the_relu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Identity(), nn.ReLU(), nn.GroupNorm(2, 8)
    )
    quantized(
        model.append(nn.Conv2d(8, 4, 1)).eval(),
        torch.randn(2, 3, 9, 9),
    )
    assert outputs(model) == {"0": True}


@pytest.mark.eight_bit_products
def test_deployed_layers_quantize_their_results() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    model = Readers().eval()
    quantized(model, x)
    deployed = torchq.deploy(model, x, target="torch")
    error = (deployed(x) - model(x)).abs().max()
    assert error <= 0.02 * model(x).abs().max()  # Codes at a border may differ by one.


def test_convolutions_and_linear_layers_alone_take_a_quantizer_of_their_results() -> (
    None
):
    pool = torchq.nn.QuantMaxPool2d(2)
    with pytest.raises(
        QuantizationError, match="cannot quantize its result; expected a conv"
    ):
        pool.quantize_output_(torchq.QuantDescriptor())
    for layer in (torchq.nn.QuantConv1d(2, 2, 1), torchq.nn.QuantLinear(2, 2)):
        layer.quantize_output_(torchq.QuantDescriptor())
        with pytest.raises(
            QuantizationError, match="layer without an output_quantizer"
        ):
            layer.quantize_output_(torchq.QuantDescriptor())


class Gated(nn.Module):
    """Linear layers: read by a GELU, by a ReLU in front of a norm, by a layer, and returned."""

    def __init__(self) -> None:
        super().__init__()
        self.soft = nn.Linear(8, 8)
        self.positive = nn.Linear(8, 8)
        self.inner = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.positive(F.gelu(self.soft(x))).relu())
        return self.last(self.inner(x))


def test_results_of_linear_layers_have_quantizers_where_the_target_wants_them() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    model = Gated().eval()
    quantized(model, x)
    assert outputs(model) == {}
    torchq.restore_(model)
    plain = model(x).detach()
    quantized(model, x, "executorch")
    assert outputs(model) == {"soft": False, "positive": True}
    torch.testing.assert_close(model(x).detach(), plain, atol=0.1, rtol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_deployed_linear_layers_quantize_their_results(dynamic: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 8)
    model = nn.Sequential(nn.Linear(8, 8))
    forms = {
        "input": torchq.QuantDescriptor(dynamic=dynamic),
        "weight": torchq.QuantDescriptor(7, axis=0),
    }
    torchq.quantize_(
        model.eval(),
        torchq.QuantConfig((torchq.Rule("*", **forms),)),
    )
    model[0].quantize_output_(torchq.QuantDescriptor(4))
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target="torch")
    assert len(model(x).unique()) <= 16
    torch.testing.assert_close(deployed(x), model(x))


@pytest.mark.parametrize("act", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(0.0, 4.0)])
def test_clipped_results_that_are_quantized_need_no_quantizer(act: nn.Module) -> None:
    """The quantizer of the next layer includes the clipping."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        act,
        nn.Conv2d(16, 16, 1),
        nn.ReLU6(),
    )
    model.append(nn.AdaptiveAvgPool2d(1))
    quantized(
        model.eval(),
        torch.randn(2, 3, 9, 9),
    )
    assert outputs(model) == {}


class Padding(nn.Module):
    """A convolution whose padded result others read."""

    def __init__(
        self, pad: nn.Module | None, other: str = "", **options: object
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.pad = pad
        self.last = nn.Conv2d(8, 4, 2)
        self.options = options
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = F.pad(x, (0, 1, 0, 1), **self.options) if self.pad is None else self.pad(x)
        y = self.last(x)
        return y + F.gelu(x)[:, :4, : y.shape[2], : y.shape[3]] if self.other else y


@pytest.mark.parametrize(
    ("model", "quantized_by_itself"),
    [
        (Padding(nn.ZeroPad2d((0, 1, 0, 1))), False),
        (Padding(nn.ConstantPad2d((0, 1, 0, 1), 0.0)), False),
        (Padding(None), False),
        (Padding(None, mode="constant", value=0.0), False),
        (Padding(nn.ConstantPad2d((0, 1, 0, 1), 1.0)), True),
        (Padding(nn.ReflectionPad2d((0, 1, 0, 1))), True),
        (Padding(None, mode="reflect"), True),
        (Padding(None, value=1.0), True),
        (Padding(None, "gelu"), True),
    ],
    ids=[
        "module",
        "constant",
        "call",
        "options",
        "ones",
        "reflect",
        "mode",
        "value",
        "gelu",
    ],
)
def test_zeros_that_convolutions_add_need_no_quantizer(
    model: nn.Module, quantized_by_itself: bool
) -> None:
    torch.manual_seed(0)
    quantized(
        model.eval(),
        torch.randn(2, 3, 9, 9),
    )
    assert ("stem" in outputs(model)) is quantized_by_itself


def test_padding_in_front_of_a_float_layer() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 9)
    model = Padding(None).eval()
    torchq.quantize_(model, target="onnxruntime", example=x, exclude=["last"])
    assert outputs(model) == {"stem": True}


class PooledBeside(nn.Module):
    """A convolution whose result a quantized mean and a layer with a float input read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose2d(8, 4, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(x).relu()
        return self.head(x.mean((2, 3))), self.up(x)


def test_readers_of_a_tensor_are_told_from_those_of_its_quantizer() -> None:
    plan = torchq.plan(
        PooledBeside(), target="onnxruntime", example=torch.randn(1, 3, 8, 8)
    )
    conv = plan.decision("conv")
    assert conv is not None
    assert conv.output is not None
    assert conv.output.unsigned


class Skip(nn.Module):
    """A result that an addition reads through sums and products that leave it as it is."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)
        self.register_buffer("factor", torch.tensor(factor))
        self.register_buffer("zero", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        skip = (x * self.factor - self.zero).clone()[:] / 1
        return self.last(self.second(x) * 1.0 + (0 + skip).float())


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_leaves_values_as_they_are_is_seen_through(factor: float) -> None:
    plan = torchq.plan(
        Skip(factor), target="onnxruntime", example=torch.randn(2, 3, 4, 4)
    )
    rounded_by = {d.name: d.rounded_by for d in plan.replaced}
    # Where a factor is left, a product in float reads the result too.
    reader = "second.input_quantizer" if factor == 1 else "first.output_quantizer"
    assert rounded_by["first"] == reader
    assert rounded_by["second"].startswith("quant_add.")


class Pyramid(nn.Module):
    """A pooled branch whose ReLU works in place, as in PSPNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.pooled = nn.Conv2d(16, 16, 1)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(32, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        pooled = self.relu(self.pooled(self.pool(x)))
        spread = F.interpolate(
            pooled, size=x.shape[2:], mode="bilinear", align_corners=True
        )
        result: Tensor = self.last(torch.cat([x, spread], 1))
        return result


def test_an_image_of_one_pixel_keeps_its_memory_order() -> None:
    """Else interpolate and the last layer take other kernels, which round in another way."""
    torch.manual_seed(0)
    model = Pyramid().eval()
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    expected = model(x)
    report = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert report.explain("pooled").count("output uint8") == 1
    with torchq.disabled(model):
        assert torch.equal(model(x), expected)


class HardSwishes(nn.Module):
    """Activations as converters to ONNX write them: a sum with 3 reads the result beside a product.

    The sum is not folded into the convolution, whose result the product reads too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.second = nn.Conv2d(16, 16, 3)
        self.head = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = x * torch.clamp(x + 3, 0, 6) / 6
        return self.head(x)


def test_a_sum_that_cannot_be_folded_reads_a_quantized_result() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = HardSwishes().eval()
    report = quantized(model, x)
    assert outputs(model) == {"first": False, "second": False}
    in_float = [d.name for d in report.replaced if d.float_kernel]
    assert in_float == ["head"]  # The model returns its result.


def test_a_result_is_quantized_once_for_its_readers(tmp_path: Path) -> None:
    """The product reads the codes of the result; runtimes drop a second pair by themselves."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    model = HardSwishes().eval()
    quantized(model, x)
    path = tmp_path / "net.onnx"
    with pytest.warns(UserWarning, match="head: its output is not quantized"):
        torchq.export_onnx(model, x, path, progress=False)
    graph = load_model(path)
    merged = read_record(graph)["merged"]
    assert merged["first.output_quantizer#2"] == "first.output_quantizer"
    pairs = [pair_name(node) for node in nodes_of(graph, "QuantizeLinear")]
    assert "first.output_quantizer" in pairs
    assert "first.output_quantizer#2" not in pairs
    report = torchq.verify_onnx(model, path, [x, x[:1]], progress=False)
    assert report.ok, report
