"""Channels that depthwise layers read are brought to one size; files have that in front."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq
from tests.rank_processes import needs_gloo, run_ranks
from torchq.config import Rule
from torchq.swap.even_channels import as_in_files, layers_with_even_channels
from torchq.workflow import CalibrationReport, quantizers
from torchq.workflow.even_channels import DepthwiseInputs

#: Spare bits, so that kernels of processors without VNNI do not overflow.
RECIPE = torchq.recipes.int8(reduce_range=True)
INPUT = torchq.QuantDescriptor()
WEIGHT = INPUT.replace(axis=0)
DEPTHWISE = ["1.2", "2.2"]


class Block(nn.Sequential):
    """An inverted residual whose channels differ in size, as they do behind folded BatchNorms."""

    def __init__(self, clip: nn.Module, multiplier: int = 1) -> None:
        wide = 24
        expand = nn.Conv2d(16, wide, 1)
        depthwise = nn.Conv2d(
            wide, wide * multiplier, 3, padding=1, groups=wide, bias=False
        )
        project = nn.Conv2d(wide * multiplier, 16, 1)
        sizes = torch.logspace(-2, 0, wide)
        with torch.no_grad():
            expand.weight.mul_(sizes.view(-1, 1, 1, 1) * 4)
            assert expand.bias is not None
            expand.bias.mul_(sizes)
            by_output = sizes.repeat_interleave(multiplier)
            depthwise.weight.div_(by_output.view(-1, 1, 1, 1))
        super().__init__(expand, clip, depthwise, project)


def network(clip: type[nn.Module] = nn.ReLU6, multiplier: int = 1) -> nn.Module:
    torch.manual_seed(0)
    stem = nn.Conv2d(16, 16, 3, padding=1)
    blocks = [Block(clip(), multiplier) for _ in range(2)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    return nn.Sequential(stem, *blocks, *head).eval()


def batches(count: int = 3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 16, 12, 12, generator=generator) for _ in range(count)]


def calibrated(
    model: nn.Module, target: Any = None, recipe: Any = RECIPE, **options: Any
) -> CalibrationReport:
    images = batches()
    torchq.quantize_(model, recipe, target=target, example=images[0], progress=False)
    return torchq.calibrate(model, images, progress=False, **options)


def results(model: nn.Module, seed: int = 5) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(batch) for batch in batches(2, seed)])


def decibels(model: nn.Module, expected: Tensor) -> float:
    noise = (results(model) - expected).square().sum()
    return float(10 * (expected.square().sum() / noise).log10())


@pytest.mark.parametrize("multiplier", [1, 2])
@pytest.mark.parametrize("clip", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("target", [None, "onnxruntime"])
def test_outputs_are_nearer_to_float(
    clip: type[nn.Module], target: str | None, multiplier: int
) -> None:
    model = network(clip, multiplier)
    expected = results(model)
    before = copy.deepcopy(model.state_dict())
    plain = network(clip, multiplier)
    calibrated(plain, target, correct=False)
    report = calibrated(model, target)
    assert list(report.even.layers) == DEPTHWISE
    assert "2 depthwise layers read channels of one size" in str(report)
    assert decibels(model, expected) > decibels(plain, expected) + 3
    for number, name in enumerate(DEPTHWISE):
        even = torchq.swap.plan_of(model).decision(name).even
        assert even is not None and even.source == f"{number + 1}.0" and even.gain > 3
    assert "files have in 1.0" in torchq.swap.plan_of(model).explain("1.2")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
    for quantizer in quantizers(model).values():
        quantizer.mode = "off"
    assert torch.equal(results(model), expected)
    torchq.restore_(model)
    assert torch.equal(results(model), expected)


@pytest.mark.parametrize("clip", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("target", [None, "onnxruntime", "tensorrt"])
def test_files_have_the_factors_in_the_layer_in_front(
    clip: type[nn.Module], target: Any, dynamo: bool, tmp_path: Path
) -> None:
    if target == "tensorrt":  # in float16 files differ from the simulation anyhow
        target = torchq.runtimes.TensorRt(precision="float32")
    model = network(clip)
    assert calibrated(model, target).even.layers
    state = copy.deepcopy(model.state_dict())
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(
        model, batches()[0], path, dynamo=dynamo, progress=False
    )
    assert written.coverage.share == 1
    assert "Mul" not in {node.op_type for node in onnx.load(str(path)).graph.node}
    assert all(torch.equal(value, state[n]) for n, value in model.state_dict().items())
    report = torchq.verify_onnx(model, path, batches(2, 5), progress=False)
    assert report.ok, str(report)
    # The proof says no for another factor.
    with torch.no_grad():
        for quantizer, half in (("input_quantizer", 0.5), ("weight_quantizer", 2.0)):
            held = model.get_submodule(f"1.2.{quantizer}").pre_quant_scale
            assert isinstance(held, Tensor)
            held[3] *= half
    report = torchq.verify_onnx(model, path, batches(2, 5), progress=False)
    assert not report.ok


@pytest.mark.parametrize("clip", [nn.ReLU, nn.ReLU6])
@pytest.mark.parametrize("target", ["onnxruntime", "torch"])
def test_the_deployed_model_computes_what_evaluation_does(
    clip: type[nn.Module], target: str
) -> None:
    model = network(clip)
    assert calibrated(model, target).even.layers
    deployed = torchq.deploy(model, batches()[0], target=target, progress=False)
    error = (results(deployed) - results(model)).abs()
    assert float((error > 1e-4).float().mean()) < 1e-3  # values at a tie


def test_folded_in_front_the_codes_are_the_same() -> None:
    model = network()
    calibrated(model)
    seen: dict[bool, Tensor] = {}
    layer: Any = model.get_submodule("1.2")

    def codes_read(folded: bool) -> None:
        def see(_: object, args: tuple[Tensor, ...]) -> None:
            quantizer = layer.input_quantizer
            seen[folded] = quantizer.codes(quantizer.scaled(args[0]))

        handle = layer.register_forward_pre_hook(see)
        model(batches()[0])
        handle.remove()

    codes_read(False)
    (source, _), *_ = layers_with_even_channels(model)
    weight = source.weight
    with as_in_files(model) as as_in_model:
        assert layer.input_quantizer.pre_quant_scale is None
        codes_read(True)
        with as_in_model():
            assert source.weight is weight
            assert layer.input_quantizer.pre_quant_scale is not None
        assert source.weight is not weight
    assert source.weight is weight
    assert torch.equal(seen[False], seen[True])


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 16, 3, padding=1)
        self.block = Block(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        made = self.block[0](self.stem(x)).relu()
        read: Tensor = self.block[2](made)
        result: Tensor = self.block[3](read + made)
        return result


def with_norm() -> nn.Module:
    model = network()
    norm = nn.BatchNorm2d(24)
    norm.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
    model[1][2] = nn.Sequential(model[1][2], norm)  # type: ignore[index, operator]
    return model.eval()


def with_transposed() -> nn.Module:
    model = network()
    front: Any = nn.ConvTranspose2d(16, 24, 1)
    with torch.no_grad():
        front.weight.copy_(model[1][0].weight.transpose(0, 1))  # type: ignore[index, operator]
        front.bias.copy_(model[1][0].bias)  # type: ignore[index, operator]
    model[1][0] = front  # type: ignore[index, operator]
    return model.eval()


def with_pool() -> nn.Module:
    model = network(nn.ReLU)
    model[1][1] = nn.Sequential(nn.ReLU(), nn.AvgPool2d(2))  # type: ignore[index, operator]
    return model.eval()


def ruled(pattern: str, **fields: Any) -> torchq.QuantConfig:
    """Return the recipe with a rule, in which fields replace what a layer has otherwise."""
    usual = {"input": INPUT, "weight": WEIGHT}
    return RECIPE.with_rules(Rule(pattern, **{**usual, **fields}))


def test_layers_that_cannot_have_factors_have_none() -> None:
    two = TwoReaders().eval()
    assert not calibrated(two).even.layers
    assert list(calibrated(with_norm()).even.layers) == ["2.2"]
    assert list(calibrated(with_transposed()).even.layers) == ["2.2"]
    # Its first dimension is that of input channels.
    assert list(calibrated(with_transposed(), recipe=ruled("1.0")).even.layers) == [
        "2.2"
    ]
    pools = RECIPE.with_rules(Rule("type:AvgPool2d", input=INPUT))
    assert list(calibrated(with_pool(), recipe=pools).even.layers) == ["2.2"]
    assert list(calibrated(with_pool()).even.layers) == DEPTHWISE


@pytest.mark.parametrize(
    ("recipe", "layers"),
    [
        (ruled("1.2"), ["2.2"]),
        (ruled("1.0"), DEPTHWISE),
        (ruled("1.0", input=None, weight=None), ["2.2"]),
        (ruled("1.0", weight=None), ["2.2"]),
        # One scale for the whole weight of the layer in front, which takes no factor by channel.
        (ruled("1.0", weight=INPUT), ["2.2"]),
        # One scale for the weights of all layers but those in front.
        (
            ruled("type:Conv2d", weight=INPUT).with_rules(
                Rule("?.0", input=INPUT, weight=WEIGHT)
            ),
            [],
        ),
        (ruled("type:Conv2d", weight=WEIGHT.replace(calib_method="activation")), []),
        (ruled("type:Conv2d", input=INPUT.replace(learn_amax=True)), DEPTHWISE),
        (ruled("type:Conv2d", input=INPUT.replace(amax=3.0)), []),
        (ruled("type:Conv2d", input=torchq.QuantDescriptor((4, 3))), []),
        (ruled("type:Conv2d", weight=None), []),
        (ruled("type:Conv2d", input=None), []),
    ],
)
def test_layers_have_factors_where_their_quantizers_can_hold_them(
    recipe: torchq.QuantConfig, layers: list[str]
) -> None:
    assert list(calibrated(network(), recipe=recipe).even.layers) == layers


def quantize_result(model: Any) -> None:
    model[1][0].quantize_output_(INPUT)


def share_quantizer(model: Any) -> None:
    """Let the last layer of the block round by the quantizer of the depthwise one."""
    model[1][3].input_quantizer = model[1][2].input_quantizer


def leave_weight_in_float(model: Any) -> None:
    model[1][0].weight_quantizer.mode = "off"


def delegate_weight(model: Any) -> None:
    """Let a function quantize the weight in front, which may compute anything."""
    model[1][0].weight_quantizer.delegate = lambda x, _: x


def delegate_of_depthwise(model: Any) -> None:
    model[1][2].input_quantizer.delegate = lambda x, _: x


def compute_depthwise_weight(model: Any) -> None:
    """Compute a weight in each forward, as spectral_norm and its like do."""
    nn.utils.parametrizations.weight_norm(model[1][2])


CHANGES = [
    quantize_result,
    share_quantizer,
    leave_weight_in_float,
    delegate_weight,
    delegate_of_depthwise,
    compute_depthwise_weight,
]


@pytest.mark.parametrize("change", CHANGES)
def test_quantizers_that_are_changed_may_take_no_factors(
    change: Callable[[Any], None],
) -> None:
    model = network()
    torchq.quantize_(model, RECIPE, progress=False)
    change(model)
    report = torchq.calibrate(model, batches(), progress=False)
    assert list(report.even.layers) == ["2.2"]
    assert "1 depthwise layer reads channels of one size" in str(report)


def test_outputs_that_nobody_can_tell_from_float_are_left_alone() -> None:
    wide = INPUT.replace(num_bits=16)
    recipe = ruled("type:Conv2d", input=wide, weight=WEIGHT.replace(num_bits=16))
    last = Rule("type:Linear", input=wide, weight=WEIGHT.replace(num_bits=16))
    model = network()
    report = calibrated(model, recipe=recipe.with_rules(last))
    assert report.even.tried == 0 and not report.even.layers
    assert all(q.pre_quant_scale is None for q in quantizers(model).values())


def test_a_range_that_ends_where_it_is_clipped_takes_factors() -> None:
    model: Any = network(nn.ReLU6)
    with torch.no_grad():
        model[1][0].weight.mul_(4)
    report = calibrated(model)
    assert "1.2" in report.even.layers
    assert quantizers(model)["1.2.input_quantizer"].amax == 6
    expected = results(model)
    with as_in_files(model):
        # But for ties, which sums in another order break in another way.
        assert (results(model) - expected).abs().median() < 1e-5


def test_codes_beyond_a_clip_take_no_factors() -> None:
    """In a file a ReLU6 would cut channels with factors at 6, where codes may reach 8."""
    rounded = ruled("type:Conv2d", input=INPUT.replace(power_of_two=True))
    assert not calibrated(network(nn.ReLU6), recipe=rounded).even.layers
    model = network(nn.ReLU)
    assert list(calibrated(model, recipe=rounded).even.layers) == DEPTHWISE
    expected = results(model)
    with as_in_files(model):
        # But for ties, which sums in another order break in another way.
        assert (results(model) - expected).abs().median() < 1e-5


def test_targets_with_ranges_of_channels_and_calls_without_corrections_have_none() -> (
    None
):
    # OpenVINO has ranges of each channel there.
    assert not calibrated(network(), "openvino").even.tried
    assert not calibrated(network(), correct=False).even.tried


def with_rare_values(seed: int) -> Tensor:
    """Return images of which each 16th has large values, at pixels that no result depends on."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 16, 12, 12, generator=generator)
    x[::16, :, 1::2, 1::2] = 100.0
    return x


class Skipping(nn.Sequential):
    """Every second pixel goes through a depthwise layer, and on through uneven channels."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        stem = nn.Conv2d(16, 16, 1, bias=False)
        nn.init.dirac_(stem.weight)
        depthwise = nn.Conv2d(16, 16, 1, stride=2, groups=16)
        super().__init__(stem, nn.ReLU(), depthwise, Block(nn.ReLU()))


def calibrated_on_rare_values(model: nn.Module) -> CalibrationReport:
    torchq.quantize_(model, RECIPE, progress=False)
    images = [with_rare_values(seed) for seed in (1, 2)]
    return torchq.calibrate(model, images, progress=False)


def largest_read(*layers: Any) -> Tensor:
    """Return the largest value that layers return in float for each image with rare values."""
    with torch.no_grad():
        x = torch.cat([with_rare_values(seed) for seed in (1, 2)])
        for layer in layers:
            x = layer(x)
    return x.flatten(1).amax(1)


def test_a_layer_that_is_not_worth_factors_keeps_its_averaged_range() -> None:
    model = Skipping().eval()
    report = calibrated_on_rare_values(model)
    assert list(report.even.layers) == ["3.2"]
    assert "2.input_quantizer" in report.averages.averaged
    plain: Any = Skipping().eval()
    samples = largest_read(plain[0], plain[1])
    average = samples.double().mean().float()
    assert average < samples.max() / 5
    torch.testing.assert_close(
        quantizers(model)["2.input_quantizer"].amax, average, rtol=1e-6, atol=0
    )
    assert quantizers(model)["2.input_quantizer"].pre_quant_scale is None
    # Where channels got factors the range holds all values again, and is no average.
    assert "3.2.input_quantizer" not in report.averages.averaged
    whole = largest_read(*list(plain)[:3], plain[3][0], plain[3][1])
    assert whole.mean() < 0.9 * whole.max()
    torch.testing.assert_close(
        quantizers(model)["3.2.input_quantizer"].amax, whole.max(), rtol=1e-5, atol=0
    )


def read_in_float(model: Any, images: list[Tensor]) -> Tensor:
    """Return what the first depthwise layer of a network reads in float, by channel."""
    with torch.no_grad():
        x = model[0](torch.cat(images))
        x = model[1][1](model[1][0](x))
    return x.movedim(1, 0).flatten(1)


def test_factors_bring_every_channel_near_the_range_of_all_values() -> None:
    """Batches differ in size: the largest is neither the first nor the last."""
    images = [x * size for x, size in zip(batches(), (0.5, 1.0, 0.7), strict=True)]
    model = network(nn.ReLU)
    torchq.quantize_(model, RECIPE, progress=False)
    # Images that nobody took come as an empty batch.
    report = torchq.calibrate(model, [*images, images[0][:0]], progress=False)
    quantizer = quantizers(model)["1.2.input_quantizer"]
    factors = quantizer.pre_quant_scale
    assert isinstance(factors, Tensor)
    values = read_in_float(network(nn.ReLU), images)
    largest = values.amax(1)
    torch.testing.assert_close(quantizer.amax, largest.max(), rtol=1e-5, atol=0)
    reached = largest * factors.flatten() / quantizer.amax
    # Half the room stays empty where a larger factor would clip too much.
    assert reached.max() <= 2.0 and reached.min() > 0.25
    assert torch.equal(factors.log2(), factors.log2().round())
    # The gain is that of the rounding of its values, of which calibration looked at some.
    noise = []
    for held in (torch.ones_like(factors), factors):
        shape = held.view(-1, 1)
        codes = (values * shape / quantizer.scale).round().clamp(max=127)
        noise.append((codes * quantizer.scale / shape - values).square().sum())
    gain = float(10 * (noise[0] / noise[1]).log10())
    assert report.even.layers["1.2"].gain == pytest.approx(gain, abs=0.5)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_rare_value_limits_the_factor_of_its_channel(sign: int) -> None:
    """Few values are looked at, and the largest of a channel may not be among them."""
    factors = []
    for rare in (0.0, 32.0):
        torch.manual_seed(0)
        front = nn.Conv2d(16, 16, 1, bias=False)
        nn.init.dirac_(front.weight)
        depthwise = nn.Conv2d(16, 16, 3, groups=16)
        model = nn.Sequential(front, depthwise, nn.Conv2d(16, 4, 1)).eval()
        with torch.no_grad():
            front.weight[8:] /= 32
            depthwise.weight[8:] *= 32
        x = torch.randn(4, 16, 64, 64).clamp(-4, 4)
        x[2, 8, 20, 30] += rare * sign
        x[:, 3] = 0
        torchq.quantize_(model, RECIPE, progress=False)
        report = torchq.calibrate(model, [x], progress=False)
        assert list(report.even.layers) == ["1"]
        quantizer = quantizers(model)["1.input_quantizer"]
        assert isinstance(quantizer.pre_quant_scale, Tensor)
        assert quantizer.pre_quant_scale[3] == 1  # for zeros any factor would do
        factors.append(float(quantizer.pre_quant_scale[8]))
        reached = factors[-1] * x[:, 8].abs().amax() / 32 / quantizer.amax
        assert 0.5 < reached <= 2.0
    assert factors[0] >= 4 * factors[1]


def test_a_method_that_is_given_sets_the_ranges() -> None:
    model, plain = network(), network()
    report = calibrated(model, method="percentile", percentile=99.0)
    calibrated(plain, method="percentile", percentile=99.0, correct=False)
    assert list(report.even.layers) == DEPTHWISE
    for name in DEPTHWISE:
        one, other = (quantizers(m)[f"{name}.input_quantizer"] for m in (model, plain))
        assert torch.equal(one.amax, other.amax)


def test_factors_that_change_no_output_are_not_kept() -> None:
    """Nothing reads any channel but the largest, which has the factor 1."""
    torch.manual_seed(0)
    block = Block(nn.ReLU())
    with torch.no_grad():
        block[3].weight[:, :-1] = 0
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), block).eval()
    plain = copy.deepcopy(model)
    report = calibrated(model)
    calibrated(plain, correct=False)
    assert report.even.tried == 1 and report.even.outputs.gain == 0
    assert not report.even.layers
    for name, quantizer in quantizers(model).items():
        assert quantizer.pre_quant_scale is None
        assert torch.equal(quantizer.amax, quantizers(plain)[name].amax)


def test_few_values_of_many_calls_are_kept() -> None:
    layer = nn.Conv2d(4, 4, 3, groups=4)
    inputs = DepthwiseInputs({"layer": layer}, None)
    with inputs.recording():
        for n in range(12):
            layer(torch.arange(4.0).view(4, 1, 1).expand(2, 4, 40, 40) + 10 * n)
    values = inputs.values["layer"]
    by_call = torch.arange(8).repeat_interleave(1024) * 10.0
    assert torch.equal(values, torch.arange(4.0).view(4, 1) + by_call)
    ends = torch.stack([torch.arange(4.0), torch.arange(4.0) + 110])
    assert torch.equal(inputs.ends["layer"], ends)


def test_inputs_without_an_error_are_not_tried() -> None:
    """Whole numbers up to 127 have codes of their own."""
    front = nn.Conv2d(4, 4, 1, bias=False)
    nn.init.dirac_(front.weight)
    depthwise = nn.Conv2d(4, 4, 3, groups=4)
    model = nn.Sequential(front, nn.ReLU(), depthwise, nn.Conv2d(4, 2, 1)).eval()
    x = torch.arange(1024).remainder(128).float().view(1, 4, 16, 16)
    torchq.quantize_(model, RECIPE, progress=False)
    report = torchq.calibrate(model, [x], progress=False)
    assert quantizers(model)["2.input_quantizer"].amax == 127
    assert report.even.tried == 0 and not report.even.layers


def test_equal_channels_keep_their_ranges() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1)
    ).eval()
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[:1].expand_as(model[0].weight))
        model[0].bias.fill_(0.1)
    plain = copy.deepcopy(model)
    report = calibrated(model)
    assert not report.even.layers
    calibrated(plain, correct=False)
    for name, quantizer in quantizers(model).items():
        assert torch.equal(quantizer.amax, quantizers(plain)[name].amax)
        assert quantizer.pre_quant_scale is None


def test_the_choice_is_copied_saved_and_made_anew(tmp_path: Path) -> None:
    model = network()
    calibrated(model, "onnxruntime")
    expected = results(model)
    assert torch.equal(results(copy.deepcopy(model)), expected)
    torchq.save(model, tmp_path / "net.pt")
    loaded = torchq.load(network(), tmp_path / "net.pt").eval()
    assert torch.equal(results(loaded), expected)
    even = torchq.swap.plan_of(loaded).decision("1.2").even
    assert even == torchq.swap.plan_of(model).decision("1.2").even
    path = tmp_path / "net.onnx"
    torchq.export_onnx(loaded, batches()[0], path, progress=False)
    assert torchq.verify_onnx(loaded, path, batches(1, 5), progress=False).ok
    again = torchq.calibrate(model, batches(), force=True, progress=False)
    assert list(again.even.layers) == DEPTHWISE
    assert torch.equal(results(model), expected)
    torchq.calibrate(model, batches(), force=True, correct=False, progress=False)
    held = [q.pre_quant_scale for q in quantizers(model).values()]
    assert any(factors is not None for factors in held)


def test_layers_that_keep_their_ranges_keep_their_factors(tmp_path: Path) -> None:
    model = network()
    calibrated(model)
    of_layer: Any = model.get_submodule("1.2")
    of_layer.input_quantizer.forget_amax()
    of_layer.weight_quantizer.forget_amax()
    with pytest.warns(UserWarning, match="14 quantizers .* keep their ranges"):
        report = torchq.calibrate(model, batches(), progress=False)
    assert list(report.even.layers) == ["1.2"]
    assert all(
        torchq.swap.plan_of(model).decision(name).even is not None for name in DEPTHWISE
    )
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, batches()[0], path, progress=False)
    assert "Mul" not in {node.op_type for node in onnx.load(str(path)).graph.node}


def test_an_image_without_a_batch_and_audio_are_calibrated_too() -> None:
    torch.manual_seed(0)
    expand = nn.Conv1d(4, 16, 1)
    with torch.no_grad():
        expand.weight.mul_(torch.logspace(-2, 0, 16).view(-1, 1, 1))
    depthwise = nn.Conv1d(16, 16, 3, groups=16)
    model = nn.Sequential(expand, nn.ReLU(), depthwise, nn.Conv1d(16, 4, 1)).eval()
    with torch.no_grad():
        depthwise.weight.div_(torch.logspace(-2, 0, 16).view(-1, 1, 1))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(4, 200, generator=generator) for _ in range(8)]
    torchq.quantize_(model, RECIPE, progress=False)
    report = torchq.calibrate(model, rows, progress=False)
    assert list(report.even.layers) == ["2"]


def _calibrate_on_rank(folder: Path) -> None:
    """Calibrate on the batches of this rank; the first has none."""
    rank = dist.get_rank()
    model = network(nn.Identity)
    torchq.quantize_(model, RECIPE, example=batches()[0], progress=False)
    own = batches() if rank else []
    report = torchq.calibrate(model, own, group=dist.group.WORLD, progress=False)
    torch.save((list(report.even.layers), model.state_dict()), folder / f"{rank}.pt")


@needs_gloo
def test_all_ranks_have_the_same_factors(tmp_path: Path) -> None:
    run_ranks(_calibrate_on_rank, tmp_path)
    (one, state), (other, same) = (torch.load(tmp_path / f"{n}.pt") for n in range(2))
    assert one == other == DEPTHWISE
    assert all(torch.equal(value, same[name]) for name, value in state.items())
    # They are those of one process with all batches, whose inputs have both signs.
    model = network(nn.Identity)
    calibrated(model)
    alone = model.state_dict()
    assert all(torch.equal(value, alone[name]) for name, value in state.items())
    assert isinstance(state["1.2.input_quantizer.pre_quant_scale"], Tensor)
