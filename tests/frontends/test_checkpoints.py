"""Models that other libraries quantized: equal codes against their own forward, or a refusal.

What needs a maker's package is skipped without it. Graphs of PT2E and a stand-in for ModelOpt's
quantizers are made by hand too, so that the shared code is tested everywhere.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # the operators of PT2E's graphs
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.swap import plan_of
from torchq.swap.optional import Replanning, replan_
from torchq.workflow.added_operators import as_example, take_back_operators_
from torchq.workflow.runs import Runs

pytestmark = pytest.mark.filterwarnings("ignore")  # the makers' own


class Residual(nn.Module):
    """Convolutions with and without groups, an addition, pooling, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Identity()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.add = torchq.nn.Add()
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.stem(self.enter(x)))
        x = self.pool(self.add(self.depthwise(x), x))
        return self.head(x.mean((2, 3)))


class Upsampling(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 6, 3, stride=2, bias=False),
            nn.ReLU(),
            nn.ConvTranspose2d(6, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
        )


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.mix = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)[:, :, :1].expand(-1, -1, 12).contiguous()
        q, k, v = self.mix(self.norm(tokens)).chunk(3, -1)
        tokens = tokens + self.out(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return self.head(tokens.mean(1))


NETWORKS = (Residual, Upsampling, Attention)


def network(cls: type[nn.Module]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return cls().eval(), torch.randn(4, 3, 8, 8)


def by_modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    mtq = pytest.importorskip("modelopt.torch.quantization")
    quantized: nn.Module = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda m: m(x))
    # Torchq has no quantizer for a LayerNorm's input.
    mtq.disable_quantizer(quantized, "*norm*")
    return quantized


def by_quanto(model: nn.Module, x: Tensor) -> nn.Module:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def by_brevitas(model: nn.Module, x: Tensor) -> nn.Module:
    qnn = pytest.importorskip("brevitas.nn")
    quant = pytest.importorskip("brevitas.quant")
    signed = {"input_quant": quant.Int8ActPerTensorFloat}
    weights = {"weight_quant": quant.Int8WeightPerChannelFloat}
    for name, m in list(model.named_modules()):
        new: nn.Module | None = None
        if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
            cls = (
                qnn.QuantConv2d
                if isinstance(m, nn.Conv2d)
                else qnn.QuantConvTranspose2d
            )
            new = cls(
                m.in_channels, m.out_channels, m.kernel_size, stride=m.stride, padding=m.padding,
                groups=m.groups, bias=m.bias is not None, **weights,
            )  # fmt: skip
        elif isinstance(m, nn.Linear):
            new = qnn.QuantLinear(
                m.in_features, m.out_features, bias=True, **signed, **weights
            )
        elif isinstance(m, nn.ReLU):
            new = qnn.QuantReLU()
        elif isinstance(m, nn.Identity):
            new = qnn.QuantIdentity(act_quant=quant.ShiftedUint8ActPerTensorFloat)
        if new is not None:
            new.load_state_dict(m.state_dict(), strict=False)
            model.set_submodule(name, new)
    model.train()(x)
    return model.eval()


def by_pt2e(model: nn.Module, x: Tensor) -> nn.Module:
    pt2e = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip(
        "torchao.quantization.pt2e.quantizer.x86_inductor_quantizer"
    )
    quantizer = x86.X86InductorQuantizer()
    quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
    prepared = pt2e.prepare_pt2e(torch.export.export(model, (x,)).module(), quantizer)
    prepared(x)
    converted: nn.Module = pt2e.convert_pt2e(prepared)
    return converted


MAKERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "modelopt": by_modelopt,
    "brevitas": by_brevitas,
    "quanto": by_quanto,
    "pt2e": by_pt2e,
}


@pytest.mark.parametrize("cls", NETWORKS)
@pytest.mark.parametrize("maker", MAKERS)
def test_adopted_networks_compute_the_makers_codes(
    maker: str, cls: type[nn.Module], tmp_path: Path
) -> None:
    """Bit for bit, but for ModelOpt, which multiplies by the reciprocal of the scale."""
    model, x = network(cls)
    other = MAKERS[maker](copy.deepcopy(model), x)
    with torch.no_grad():
        expected = other(x)
        drift = expected - model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the weights are those of the other one
    torchq.adopt_(model, other)
    with torch.no_grad():
        actual = model(x)
    assert drift.norm() > 0
    if maker == "modelopt":
        assert codes_differ(model, other, x) == 0
        assert torch.allclose(actual, expected, atol=1e-6)
    else:
        assert torch.equal(actual, expected)
    path = tmp_path / "adopted.pt"
    torchq.save(model, path)
    again = cls().eval()
    torchq.load(again, path)
    with torch.no_grad():
        assert torch.equal(again(x), actual)


def codes_differ(
    model: nn.Module, other: nn.Module, x: Tensor, ties: float = 0.0
) -> int:
    """Return how many codes differ between quantizers of ModelOpt and ours on the same tensors.

    Those of values that are within ``ties`` of the border between two codes do not count.
    """
    differ: dict[str, int] = {}
    seen = 0

    def compare(name: str) -> Any:
        ours: Any = model.get_submodule(name)

        def hook(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            with torch.no_grad():
                differing = (ours(args[0]) - out).abs() > 0.5 * ours.scale
                quotient = args[0] / ours.scale
                from_border = (quotient - quotient.floor() - 0.5).abs()
                count = int((differing & (from_border >= ties)).sum())
                differ[name] = differ.get(name, 0) + count

        return hook

    handles = []
    for name, quantizer in model.named_modules():
        if isinstance(quantizer, torchq.TensorQuantizer):
            seen += 1
            handles.append(
                other.get_submodule(name).register_forward_hook(compare(name))
            )
    with torch.no_grad():
        other(x)
    for handle in handles:
        handle.remove()
    assert len(differ) == seen > 0
    return sum(differ.values())


# --- without the makers' packages ---------------------------------------------------------------

OPS = torch.ops.quantized_decomposed


class PairedNet(nn.Module):
    """What convert_pt2e makes of a network, with parameters that no range gives to the last bit."""

    def __init__(
        self,
        *,
        high: int = 255,
        ends_quantized: bool = False,
        reads_twice: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.high = high
        self.ends_quantized = ends_quantized
        self.reads_twice = reads_twice
        codes = torch.randint(-128, 128, self.conv.weight.shape, dtype=torch.int8)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", torch.rand(4) / 100 + 1e-3)
        self.register_buffer("points", torch.zeros(4, dtype=torch.int64))

    def pair(self, x: Tensor, scale: float, point: int) -> Tensor:
        grid = (scale, point, 0, self.high, torch.uint8)
        result: Tensor = OPS.dequantize_per_tensor(
            OPS.quantize_per_tensor(x, *grid), *grid
        )
        return result

    def forward(self, x: Tensor) -> Tensor:
        weight = OPS.dequantize_per_channel(
            self.codes, self.scales, self.points, 0, -128, 127, torch.int8
        )
        x = read = self.pair(x, 0.012349679134786129, 117)
        x = torch.nn.functional.conv2d(x, weight, self.conv.bias).relu()
        x = self.pair(torch.max_pool2d(self.pair(x, 0.0071, 0), 2), 0.0071, 0)
        x = self.head(self.pool(x).flatten(1))
        if self.reads_twice:
            x = x + self.pair(read.flatten(1), 0.012349679134786129, 117).mean()
        return self.pair(x, 0.1, 3) if self.ends_quantized else x


class FloatNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.head = nn.Linear(4, 2)
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(torch.max_pool2d(self.conv(x).relu(), 2)).flatten(1))


def exported(**options: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    graph = torch.export.export(PairedNet(**options).eval(), (x,)).module()
    # convert_pt2e keeps the module that called the layer.
    for node in graph.graph.nodes:
        if str(node.target).startswith("aten.conv2d"):
            node.meta["nn_module_stack"] = {"conv": ("conv", nn.Conv2d)}
    return graph, x


@pytest.mark.parametrize("as_program", [False, True])
def test_a_graph_of_pairs_is_adopted_bit_for_bit(as_program: bool) -> None:
    """The pair behind the pooling repeats the one in front of it, and none is lost."""
    graph, x = exported()
    other = torch.export.export(graph, (x,)) if as_program else graph
    model: Any = FloatNet().eval()
    torchq.adopt_(model, other)
    places = ["conv.input_quantizer", "conv.weight_quantizer", "pool.input_quantizer"]
    quantizers = [
        n for n, m in model.named_modules() if isinstance(m, torchq.TensorQuantizer)
    ]
    assert quantizers == places
    with torch.no_grad():
        assert torch.equal(model(x), graph(x))
    scale, point = model.conv.input_quantizer.calculate_qparams()
    assert (float(scale), int(point)) == (
        float(torch.tensor(0.012349679134786129)),
        117,
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"high": 100}, r"conv: conv2d: codes from 0 to 100"),
        ({"ends_quantized": True}, r"output: output: a quantized result"),
        ({"reads_twice": True}, r"mean: mean: a quantized operator of a FloatNet"),
    ],
)
def test_what_a_graph_quantizes_otherwise_is_refused(
    options: dict[str, Any], text: str
) -> None:
    graph, _ = exported(**options)
    unchanged_after_refusal(FloatNet().eval(), graph, text)


def test_a_norm_that_the_graph_has_folded_is_named() -> None:
    class Normed(FloatNet):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

    unchanged_after_refusal(
        Normed().eval(), exported()[0], "norm: folded .* torchq.fuse_"
    )


def test_other_networks_are_refused() -> None:
    graph, _ = exported()
    model = FloatNet().eval()
    model.conv = nn.Conv2d(3, 5, 3)
    unchanged_after_refusal(model, graph, "the networks differ: conv.weight, conv.bias")
    with pytest.raises(
        ConfigError, match=r"a Linear in which nothing is quantized by a known"
    ):
        torchq.adopt_(
            nn.Linear(2, 2),
            nn.Linear(2, 2),
        )
    quantized = FloatNet()
    torchq.quantize_(quantized)
    with pytest.raises(ConfigError, match="a quantized model; expected a float one"):
        torchq.adopt_(quantized, graph)


class Repeated(nn.Module):
    """One layer at two places of the tree, called at the second one, or at both."""

    def __init__(self, *, is_called_twice: bool, amax_at_second: float = 1.5) -> None:
        super().__init__()
        self.first = stand_in()[0]
        self.second = copy.deepcopy(self.first)
        self.second.input_quantizer.amax = torch.tensor(amax_at_second)
        if not is_called_twice:
            self.second = self.first


@pytest.mark.parametrize("is_called_twice", [False, True])
def test_a_layer_at_two_places_is_adopted_once(is_called_twice: bool) -> None:
    model: Any = nn.Module()
    model.first = nn.Linear(4, 3)
    model.second = model.first
    other: Any = Repeated(is_called_twice=is_called_twice)
    torchq.adopt_(model, other)
    assert float(model.second.input_quantizer.amax) == 1.5
    assert torch.equal(model.second.weight, other.first.weight)


def test_a_layer_on_different_grids_at_its_places_is_named() -> None:
    model: Any = nn.Module()
    model.first = nn.Linear(4, 3)
    model.second = model.first
    other = Repeated(is_called_twice=True, amax_at_second=2.0)
    unchanged_after_refusal(
        model, other, "first: is second too, and quantized in another way"
    )


def test_tensors_that_the_maker_knows_by_another_name_are_found() -> None:
    """A graph has one name for a tensor, whatever the tree of modules."""
    model: Any = nn.Module()
    model.first = nn.Linear(4, 3)
    model.second = model.first
    other: Any = nn.Module()
    other.second = stand_in()[0]
    torchq.adopt_(model, other)
    assert torch.equal(model.first.weight, other.second.weight)


def test_values_of_a_maker_that_are_no_numbers_are_refused() -> None:
    graph, _ = exported()
    # As where codes were divided by the scale of a channel of zeros.
    graph.scales[1] = torch.nan
    unchanged_after_refusal(
        FloatNet().eval(), graph, "conv.weight: got values that are NaN"
    )


def unchanged_after_refusal(model: nn.Module, other: nn.Module, text: str) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(ConfigError, match=text):
        torchq.adopt_(model, other)
    assert str(model) == str(before)
    assert not torchq.runtime.planned_target(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.state_dict().items())


class TensorQuantizer(nn.Module):
    """The public attributes of ModelOpt's quantizer."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        known = {"num_bits": 8, "axis": None, "unsigned": False, "narrow_range": False}
        known |= {"block_sizes": None, "bias": None, "rotate_is_enabled": False}
        known |= {"fake_quant": True, "is_enabled": True, "pre_quant_scale": None}
        for name, value in (known | fields).items():
            setattr(self, name, value)


TensorQuantizer.__module__ = "modelopt.torch.quantization.nn"


def stand_in(**fields: Any) -> Any:
    """Return a linear layer as ModelOpt leaves it."""
    layer = nn.Linear(4, 3)
    layer.input_quantizer = TensorQuantizer(**{"amax": torch.tensor(1.5), **fields})
    layer.weight_quantizer = TensorQuantizer(
        amax=torch.tensor([[1.0], [0.5], [2.0]]), axis=0
    )
    return nn.Sequential(layer)


def test_ranges_formats_and_factors_are_taken() -> None:
    factor = torch.tensor([1.0, 2.0, 4.0, 0.5])
    other = stand_in(num_bits=4, narrow_range=True, pre_quant_scale=factor)
    model: Any = nn.Sequential(nn.Linear(4, 3))
    torchq.adopt_(model, other)
    first = model[0].input_quantizer
    weight = model[0].weight_quantizer
    assert str(first.descriptor.format) == "int4_narrow"
    assert float(first.amax) == 1.5
    assert torch.equal(first.pre_quant_scale, factor)
    assert weight.amax.flatten().tolist() == [1.0, 0.5, 2.0]
    assert torch.equal(model[0].weight, other[0].weight)
    other[0].weight_quantizer.is_enabled = False
    torchq.adopt_(alone := nn.Sequential(nn.Linear(4, 3)), other)
    assert isinstance(alone[0].weight_quantizer, nn.Identity)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"block_sizes": {-1: 16}}, "0: input_quantizer has blocks"),
        ({"_dynamic": True}, "has a range that each call takes"),
        ({"amax": None}, "has no calibrated range"),
        ({"fake_quant": False}, "has codes instead of values"),
        ({"amax": torch.tensor(torch.inf)}, "0.input_quantizer"),
    ],
)
def test_quantizers_that_torchq_lacks_are_named(
    fields: dict[str, Any], text: str
) -> None:
    unchanged_after_refusal(
        nn.Sequential(nn.Linear(4, 3)),
        stand_in(**fields),
        text,
    )


class Joining(nn.Module):
    """A tensor that a layer, an addition and a concatenation read; ReLUs in front of layers."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.third = nn.Conv2d(32, 16, 1)
        self.last = nn.Conv2d(16, 16, 1)
        self.act = activation()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        y = x + self.act(self.second(x))
        z = self.act(self.third(torch.cat([x, y], 1)))
        return self.last(z).mean((2, 3))


def calibrated_as_modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy whose layers have ranges of what they read, as ModelOpt's have."""
    other = copy.deepcopy(model)
    layers = [m for m in other.modules() if isinstance(m, nn.Conv2d)]
    for layer in layers:

        def read(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
            layer.input_quantizer = TensorQuantizer(amax=args[0].abs().max())

        layer.register_forward_pre_hook(read)
    with torch.no_grad():
        other(x)
    for layer in layers:
        layer._forward_pre_hooks.clear()
        amax = layer.weight.detach().abs().amax((1, 2, 3), keepdim=True)
        layer.weight_quantizer = TensorQuantizer(amax=amax, axis=0)
    return other


@pytest.mark.eight_bit_products("onnxruntime")
@pytest.mark.parametrize("activation", [nn.ReLU, nn.ReLU6, nn.SiLU])
def test_what_a_target_needs_is_added_and_adopted_codes_stay(
    activation: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model: Any = Joining(activation).eval()
    x = torch.randn(8, 3, 8, 8)
    theirs = calibrated_as_modelopt(model, x)
    torchq.adopt_(alone := copy.deepcopy(model), theirs)
    adopted = torchq.workflow.quantizers(alone)
    plan = torchq.adopt_(model, theirs, target="onnxruntime", example=x)
    assert "beside those adopted have no range yet: torchq.calibrate(" in str(plan)
    added = torchq.workflow.quantizers(model).keys() - adopted.keys()
    assert added
    torchq.calibrate(model, [x], progress=False)
    # What reads a tensor with a range of the maker's has that range, in front of a layer or behind.
    assert model.quant_add.input_quantizer is model.second.input_quantizer
    assert model.quant_cat.input_quantizer is model.third.input_quantizer
    assert model.second.input_quantizer is not model.third.input_quantizer
    for name, quantizer in adopted.items():
        held = model.get_submodule(name)
        assert held.quantizing
        assert held.descriptor.replace(name=None) == quantizer.descriptor.replace(
            name=None
        )
        assert torch.equal(held.amax, quantizer.amax)
        assert torch.equal(held.scale, quantizer.scale)
    path = tmp_path / "net.onnx"
    shares = []
    for network in (alone, model):
        written = torchq.export_onnx(
            network, x, path, target="onnxruntime", progress=False
        )
        shares.append(written.coverage.share)
    assert shares[0] == 0
    assert shares[1] == 1
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
    # Calibrating anew decides anew about operators, not about what is adopted.
    torchq.calibrate(model, [x / 2], progress=False)
    torchq.save(model, tmp_path / "net.pt")
    again = torchq.load(Joining(activation).eval(), tmp_path / "net.pt")
    for name, quantizer in adopted.items():
        assert torch.equal(again.get_submodule(name).amax, quantizer.amax)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_a_target_and_an_example_go_together() -> None:
    model, x = nn.Sequential(nn.Linear(4, 3)), torch.zeros(2, 4)
    for options, got in (
        ({"target": "onnxruntime"}, "a target alone"),
        ({"example": x}, "an example alone"),
    ):
        with pytest.raises(ConfigError, match=f"adopt_: got {got}; expected both"):
            torchq.adopt_(model, stand_in(), **options)
        assert not torchq.workflow.is_quantized(model)
    with pytest.raises(ConfigError, match="expected one of"):
        torchq.adopt_(model, stand_in(), target="unknown", example=x)


def test_a_range_with_factors_is_shared_with_nothing() -> None:
    """A quantizer that divides channels is that of its layer alone."""

    class Two(nn.Module):
        def __init__(self, first: nn.Module, second: nn.Module) -> None:
            super().__init__()
            self.first = first
            self.second = second

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x)

    factor = torch.tensor([1.0, 2.0, 4.0, 0.5])
    theirs = Two(
        stand_in(pre_quant_scale=factor)[0], stand_in(pre_quant_scale=factor)[0]
    )
    model: Any = Two(nn.Linear(4, 3), nn.Linear(4, 3)).eval()
    torchq.adopt_(model, theirs, target="openvino", example=torch.randn(2, 4))
    quantizers = [model.first.input_quantizer, model.second.input_quantizer]
    assert quantizers[0] is not quantizers[1]
    assert all(torch.equal(q.pre_quant_scale, factor) for q in quantizers)


def test_operators_that_come_back_leave_adopted_ranges_apart() -> None:
    """Calibrating anew takes back what it had left in float, and joins no two held ranges."""
    torch.manual_seed(0)
    model: Any = Joining(nn.ReLU).eval()
    x = torch.randn(8, 3, 8, 8)
    theirs = calibrated_as_modelopt(model, x)
    torchq.adopt_(model, theirs, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], correct=False, progress=False)
    amaxes = {n: q.amax.clone() for n, q in torchq.workflow.quantizers(model).items()}
    runtime = torchq.runtimes.RUNTIMES["onnxruntime"]
    replanning = Replanning.of(
        model, plan_of(model), runtime, as_example(model, (x,), {})
    )
    replan_(model, replanning.without(["quant_cat", "quant_add"]))
    assert not model.quant_cat.input_quantizer.quantizing
    take_back_operators_(Runs(model, [x], None))
    assert model.quant_cat.input_quantizer.quantizing
    assert model.quant_add.input_quantizer is model.second.input_quantizer
    assert model.quant_cat.input_quantizer is model.third.input_quantizer
    assert model.second.input_quantizer is not model.third.input_quantizer
    for name, quantizer in torchq.workflow.quantizers(model).items():
        if name in amaxes and not name.startswith("quant_"):
            assert torch.equal(quantizer.amax, amaxes[name])


@pytest.mark.parametrize("name", list(torchq.runtimes.RUNTIMES))
def test_every_target_keeps_what_is_adopted(name: str) -> None:
    torch.manual_seed(0)
    model, x = Joining(nn.ReLU).eval(), torch.randn(4, 3, 8, 8)
    theirs = calibrated_as_modelopt(model, x)
    torchq.adopt_(alone := copy.deepcopy(model), theirs)
    layers = {d.name for d in plan_of(alone).replaced}
    target = torchq.runtimes.RUNTIMES[name]
    if target.codes is not None and target.codes.scales is not None:
        with pytest.raises(ConfigError, match="files have scales in float16; expected"):
            torchq.adopt_(model, theirs, target=name, example=x)
        assert not torchq.workflow.is_quantized(model)
        target = torchq.runtimes.TensorRt(precision="float32")
    torchq.adopt_(model, theirs, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    for adopted in (alone, model):
        plan = plan_of(adopted)
        assert {d.name for d in plan.replaced if d.adopted} == layers
        assert torchq.swap.Plan.from_dict(plan.to_dict()) == plan
    for path, quantizer in torchq.workflow.quantizers(alone).items():
        assert torch.equal(model.get_submodule(path).amax, quantizer.amax)
        assert model.get_submodule(path).quantizing
