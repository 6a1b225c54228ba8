"""Channels that depthwise layers read are brought to one size; files have that in front."""

import copy
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

#: Spare bits, so that kernels of processors without VNNI do not overflow.
RECIPE = torchq.recipes.int8(reduce_range=True)
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


def test_layers_that_cannot_have_factors_have_none() -> None:
    two = TwoReaders().eval()
    assert not calibrated(two).even.layers
    assert list(calibrated(with_norm()).even.layers) == ["2.2"]
    descriptor = torchq.QuantDescriptor()
    rule = Rule("1.2", input=descriptor, weight=descriptor.replace(axis=0))
    ruled = RECIPE.with_rules(rule)
    assert list(calibrated(network(), recipe=ruled).even.layers) == ["2.2"]
    # OpenVINO has ranges of each channel there.
    assert not calibrated(network(), "openvino").even.tried
    assert not calibrated(network(), correct=False).even.tried


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
    model = network()
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
    assert isinstance(state["1.2.input_quantizer.pre_quant_scale"], Tensor)
