"""In eval mode a layer that is planned for an integer kernel computes what the kernel does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import Parts
from torchq.formats import UINT8
from torchq.functional import QParams
from torchq.functional.kernels import tiled
from torchq.nn import QuantAdd
from torchq.nn.integer_kernel import IntegerKernel, kernels_off
from torchq.nn.kept_numbers import KeptNumbers
from torchq.runtimes.onnxruntime.arithmetic import OnnxRuntimeArithmetic


class Block(Parts):
    """Two convolutions, the second of which is added to what it reads, and a head."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = (self.second(x) + x).relu()
        return self.head(self.third(x).relu().mean((2, 3)))


def block(**convolution: Any) -> nn.Module:
    """Return a small calibrated network for ONNX Runtime, in eval mode."""
    torch.manual_seed(0)
    options = {"kernel_size": 3, "padding": 1} | convolution
    model = Block(
        first=nn.Conv2d(3, 16, 3),
        second=nn.Conv2d(16, 16, **options),
        third=nn.Conv2d(16, 16, **options),
        head=nn.Linear(16, 4),
    ).eval()
    x = images()
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    return model


class Overwriting(Block):
    """The same with an addition that overwrites an operand, as torchvision's ResNets have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        y = self.second(x)
        y += x
        return self.head(self.third(y.relu_()).relu().mean((2, 3)))


@pytest.mark.parametrize("network", [Block, Overwriting])
def test_a_sum_is_rounded_for_the_layers_behind_it(network: type[Block]) -> None:
    parts = block()
    model = network(
        **{name: getattr(parts, name) for name in ("first", "second", "third", "head")}
    )
    torchq.restore_(model)
    plan = torchq.plan(model, target="onnxruntime", example=images())
    assert plan.decision("quant_add").rounded_by == "third.input_quantizer"


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 3, 10, 10, generator=torch.Generator().manual_seed(3))


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(x)
    return result


def input_of(model: nn.Module, layer: nn.Module, x: Tensor) -> Tensor:
    """Return what a layer reads."""
    inputs: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    evaluated(model, x)
    handle.remove()
    return inputs[0]


def reference(
    layer: Any, x: Tensor, result: Any, convolve: Callable[..., Tensor]
) -> Tensor:
    """Return what QLinearConv gives for an input, from int64 sums and numbers of their own."""
    of_input = layer.input_quantizer.qparams()
    of_weight = layer.weight_quantizer.qparams()
    codes = layer.input_quantizer.codes(x).long() - of_input.zero_point
    weight = layer.weight_quantizer.codes(layer.weight.detach()).long()
    scale_x = of_input.scale.reshape(()).numpy()
    scale_w = of_weight.scale.flatten().numpy()
    scale_y = result.scale.reshape(()).numpy()
    step = torch.from_numpy(scale_x * scale_w)
    bias = torch.from_numpy(layer.bias.detach().numpy() / step.numpy()).round().long()
    sums = convolve(codes.double(), weight.double(), bias.double()).long()
    factor = torch.from_numpy((scale_x * scale_w) / scale_y)
    return (sums.float() * factor[:, None, None]).round() * result.scale


@pytest.mark.parametrize("groups", [1, 2, 16])
def test_a_convolution_gives_the_codes_of_its_kernel(groups: int) -> None:
    model = block(groups=groups)
    layer: Any = model.second
    x = input_of(model, layer, images())
    expected = reference(
        layer,
        x,
        model.get_submodule(layer.rounded_by),
        lambda *args: F.conv2d(*args, padding=1, groups=groups),
    )
    assert torch.equal(evaluated(layer, x), expected)
    with torch.enable_grad():
        simulated = layer(x)
    assert not torch.equal(simulated, expected)


def test_tiles_of_a_cache_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are rounded piece by piece, with the factors of their channels."""
    model = block()
    x = images()
    last = x.contiguous(memory_format=torch.channels_last)
    expected = evaluated(model, x), evaluated(model.first, x[0])
    for size in (7, 40, 450):
        monkeypatch.setattr(tiled, "_TILE", size)
        assert torch.equal(evaluated(model, x), expected[0])
        assert torch.equal(evaluated(model, last), expected[0])
        assert torch.equal(
            evaluated(model.first, x[0]),
            expected[1],
        )


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("onnxruntime", "; evaluation computes the codes of onnxruntime"),
        ("openvino", " from 1 batch; evaluation simulates"),
        (None, " from 1 batch"),
    ],
)
def test_the_report_of_calibration_says_what_evaluation_computes(
    target: str | None, line: str
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    x = images()
    torchq.quantize_(model, target=target, example=x, progress=False)
    report = torchq.calibrate(model, [x], correct=False, progress=False)
    assert str(report).endswith(line)


def last_bit(layer: Any) -> None:
    layer.weight_quantizer.amax = layer.weight_quantizer.amax.nextafter(
        torch.tensor(torch.inf)
    )


def test_what_has_no_formulas_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("code_biases", "float_products", "operators"):
        monkeypatch.setattr(OnnxRuntimeArithmetic, part, None)
    model = block()
    x = images()
    simulated = evaluated(model, x)
    with kernels_off(model):
        assert torch.equal(simulated, evaluated(model, x))
    monkeypatch.undo()
    assert not torch.equal(simulated, evaluated(block(), x))


def one_bias_by_one(layer: Any) -> None:
    step = layer.input_quantizer.scale * layer.weight_quantizer.scale.flatten()
    layer.bias.data[0] += step.flatten()[0]


def other_input_range(layer: Any) -> None:
    layer.input_quantizer.range = layer.input_quantizer.range.map(
        lambda end: end * 1.01
    )


def weight_in_place(layer: Any) -> None:
    layer.weight.data[0, 0, 0, 0] += 4 * layer.weight_quantizer.scale.flatten()[0]


def new_weight(layer: Any) -> None:
    layer.weight.data = layer.weight.data.flip(0)


def loaded(layer: Any) -> None:
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    state["weight"] = state["weight"].flip(0)
    layer.load_state_dict(state)


def shifted(layer: Any) -> None:
    layer.correct_output_(
        torch.full((16,), 1.5),
        torch.full((16,), 0.1),
    )


CHANGES = [
    one_bias_by_one,
    other_input_range,
    weight_in_place,
    new_weight,
    loaded,
    shifted,
    last_bit,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_numbers_changes_results(change: Callable[[Any], None]) -> None:
    """Numbers are kept between calls; those of a copy, made after the change, are new."""
    model = block()
    x = images(64)
    before = evaluated(model, x)
    change(model.second)
    after = evaluated(model, x)
    assert torch.equal(after, evaluated(copy.deepcopy(model), x))
    layer: Any = model.second
    convolve = lambda *args: F.conv2d(*args, padding=1)  # noqa: E731
    if change is not shifted:
        given = input_of(model, layer, x)
        result = model.get_submodule(layer.rounded_by)
        assert torch.equal(
            evaluated(layer, given), reference(layer, given, result, convolve)
        )
    # The last bit of a scale turns no code over here: the numbers themselves tell.
    assert change is last_bit or not torch.equal(before, after)


def test_copies_and_pickles_compute_the_same_and_hold_no_kept_numbers() -> None:
    model = block()
    x = images()
    expected = evaluated(model, x)
    data = pickle.dumps(model)
    for copied in (copy.deepcopy(model), pickle.loads(data)):
        kernel = copied.first.integer_kernel
        assert (
            kernel.result
            is copied.second.input_quantizer
            is not model.second.input_quantizer
        )
        assert torch.equal(evaluated(copied, x), expected)
    assert len(data) == len(pickle.dumps(copy.deepcopy(model)))
    assert not any("kernel" in key or "kept" in key for key in model.state_dict())
    alone = copy.deepcopy(model.first)
    assert alone.integer_kernel.result is None  # its reader was not copied
    given = evaluated(alone, x)
    with torch.enable_grad():
        assert torch.equal(given, model.first(x))


def gradients(model: Any) -> Any:
    return torch.enable_grad()


@contextmanager
def training(model: Any) -> Iterator[None]:
    model.train()
    yield


@contextmanager
def delegate(model: Any) -> Iterator[None]:
    for layer in (model.first, model.second, model.third, model.head):
        layer.input_quantizer.delegate = lambda x, quantizer: quantizer.apply_own(x)
    yield


@contextmanager
def reader_is_gone(model: Any) -> Iterator[None]:
    for layer in (model.first, model.second, model.third):
        layer.integer_kernel = IntegerKernel("onnxruntime", None)
    yield


@contextmanager
def observing(model: Any) -> Iterator[None]:
    for layer in (model.first, model.second, model.third):
        layer.input_quantizer.mode = "observe+quantize"
    yield


@pytest.mark.parametrize(
    "how", [gradients, training, delegate, reader_is_gone, observing]
)
def test_everything_else_simulates(how: Callable[[Any], Any]) -> None:
    model = block()
    x = images()
    layer: Any = model.second
    given = input_of(model, layer, x)
    exact = evaluated(layer, given)
    with torch.no_grad(), how(model):
        actual = layer(given).detach()
    step = model.get_submodule(layer.rounded_by).scale
    assert torch.equal((exact / step).round() * step, exact)
    assert not torch.equal((actual / step).round() * step, actual)
    torch.testing.assert_close(actual, exact, rtol=0, atol=0.51 * float(step))


def test_traced_and_exported_models_simulate() -> None:
    model = block()
    x = images()
    with torch.enable_grad():
        simulated = model(x).detach()
    with torch.no_grad():
        exported = torch.export.export(model, (x,), strict=False).module()
        assert torch.equal(exported(x), simulated)


def test_autocast_simulates() -> None:
    """It would round the sums of codes to bfloat16."""
    model = block()
    x = images()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.enable_grad():
            simulated = model(x).detach()
        assert torch.equal(evaluated(model, x), simulated)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_few_bits_simulate(dtype: torch.dtype) -> None:
    """Sums of codes have more digits than their numbers."""
    model = block().to(dtype)
    x = images().to(dtype)
    with torch.enable_grad():
        simulated = model(x).detach()
    assert simulated.dtype is dtype
    assert torch.equal(evaluated(model, x), simulated)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace.*` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning")
def test_a_trace_without_gradients_simulates_and_says_nothing() -> None:
    model = block()
    x = images()
    with torch.enable_grad():
        simulated = model(x).detach()
    with torch.no_grad():
        traced = torch.jit.trace(model, x, check_trace=False)
        assert torch.equal(traced(x), simulated)


def test_a_hook_may_change_what_a_quantizer_returns() -> None:
    """Values on the grid are multiplied as codes, others in float; each call is seen once."""
    model = block()
    x = images()
    layer: Any = model.second
    given = input_of(model, layer, x)
    expected = evaluated(layer, given)
    seen: list[Tensor] = []
    quantizers = layer.input_quantizer, layer.weight_quantizer
    handles = [
        q.register_forward_hook(lambda _, i, out: seen.append(out)) for q in quantizers
    ]
    assert torch.equal(evaluated(layer, given), expected)
    assert len(seen) == 2
    handles.append(
        layer.input_quantizer.register_forward_hook(lambda _, i, out: out * 1.0001)
    )
    actual = evaluated(layer, given)
    assert len(seen) == 4
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual, expected, rtol=0.01, atol=0.05)
    for handle in handles:
        handle.remove()
    layer.weight_quantizer.register_forward_hook(lambda _, i, out: out * 0)
    with torch.enable_grad():
        without_products = layer(given)
    assert torch.equal(evaluated(layer, given), without_products)


def test_a_kernel_that_is_not_exact_is_noticed_and_gone_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Winograd's kernel on an Arm: sums are no whole numbers, for some sizes of a batch."""
    model = block()
    x = images()
    expected = evaluated(model, x), evaluated(model, x[:2])
    plain = nn.Conv2d._conv_forward
    calls: list[torch.dtype] = []

    def rounds(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        calls.append(x.dtype)
        result = plain(self, x, weight, bias)
        return (
            result * (1 + 2**-22) if x.dtype is torch.float32 and len(x) > 2 else result
        )

    monkeypatch.setattr(nn.Conv2d, "_conv_forward", rounds)
    model = copy.deepcopy(model)
    assert torch.equal(evaluated(model, x), expected[0])
    assert torch.equal(
        evaluated(model, x[:2]),
        expected[1],
    )
    calls.clear()
    assert torch.equal(evaluated(model, x), expected[0])
    assert calls == 3 * [torch.float64]  # The float32 kernel is not tried again.
    calls.clear()
    assert torch.equal(
        evaluated(model, x[:2]),
        expected[1],
    )
    assert calls == 3 * [torch.float32]


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")
def test_kernels_other_than_those_of_onednn_give_the_same_bits() -> None:
    """Without oneDNN, torch takes Winograd's kernel of NNPACK for 16 images, where it has one."""
    model = block()
    x = images(20)
    expected = evaluated(model, x)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(evaluated(model, x), expected)
        assert torch.equal(
            evaluated(model, x[:4]),
            expected[:4],
        )


@pytest.mark.parametrize("features", [700, 1400, 3000])
def test_sums_too_large_for_float32_are_added_in_parts(features: int) -> None:
    """With all products near 255 * 127, 518 of them pass 2**24."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(features, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)
    ).eval()
    nn.init.uniform_(model[0].weight, 0.9, 1)
    x = torch.rand(2, features, 3, 3) * 0.1 + 0.9
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    assert model[0].rounded_by
    actual = evaluated(model[0], x)
    expected = reference(
        model[0],
        x,
        model[2].input_quantizer,
        F.conv2d,
    )
    assert torch.equal(actual, expected)


class Sum(nn.Module):
    """Two tensors of codes, and the quantizer that a kernel rounds their sum for."""

    def __init__(self) -> None:
        super().__init__()
        codes = torchq.QuantDescriptor(8, symmetric=False, unsigned=True)
        self.add = QuantAdd()
        self.add.input_quantizer = torchq.TensorQuantizer(codes)
        self.add.other_quantizer = torchq.TensorQuantizer(codes)
        self.after = torchq.TensorQuantizer(codes)
        self.add.rounded_by = "after"
        self.add.integer_kernel = IntegerKernel("onnxruntime", self.after)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after.codes(self.add(x, y).relu())


def test_sums_of_codes_are_rounded_as_a_kernel_does() -> None:
    """All pairs of codes against fused multiply-adds in exact arithmetic, rounded once each."""
    model = Sum().eval()
    ends = [model.add.input_quantizer, model.add.other_quantizer, model.after]
    numbers = [(0.046315, 146), (0.032183, 165), (0.04923, 0)]
    for quantizer, (scale, zero_point) in zip(ends, numbers, strict=True):
        quantizer.set_qparams(torch.tensor(scale), torch.tensor(zero_point))
    a, b, c = (q.scale.reshape(()) for q in ends)
    ratio_a = (a / c).double()
    ratio_b = (b / c).double()
    codes = torch.arange(256.0)
    x = ((codes - 146) * a)[:, None].expand(256, 256)
    y = ((codes - 165) * b)[None].expand(256, 256)
    of_b = (ratio_b * 165).float().double()
    fixed = -(ratio_a * 146 + of_b).float().double()
    second = (codes.double() * ratio_b + fixed).float().double()
    expected = (
        (codes.double()[:, None] * ratio_a + second[None]).float().round().clamp(0, 255)
    )
    with torch.no_grad():
        actual = model(x, y)
    assert torch.equal(actual, expected)
    first = (codes.double() * ratio_a + fixed).float().double()
    other_order = (codes.double() * ratio_b)[None] + first[:, None]
    differs = actual != other_order.float().round().clamp(0, 255)
    assert differs.nonzero().tolist() == [[131, 195]]


def test_products_of_codes_are_rounded_as_a_kernel_does() -> None:
    """All pairs of codes: the zero point is added before rounding, which turns ties over."""
    runtime = torchq.runtimes.RUNTIMES["onnxruntime"]
    assert runtime.arithmetic is not None
    a, b, c = (
        QParams(torch.tensor(scale), torch.tensor(point), UINT8)
        for scale, point in [(0.5, 3), (0.25, 128), (0.5, 101)]
    )
    products = torch.arange(-3.0, 253)[:, None] * torch.arange(-128.0, 128)
    actual = runtime.arithmetic.operators.multiplies(a, b, c)(products.clone())
    exact = products.double() * 0.25
    assert torch.equal(actual, (exact + 101).round() - 101)
    assert not torch.equal(actual, exact.round().float())  # every tie differs


def test_sigmoids_are_looked_up_as_a_kernel_does() -> None:
    """Against the definition in float64; of this grid one code is at a tie, where torch differs."""
    runtime = torchq.runtimes.RUNTIMES["onnxruntime"]
    assert runtime.arithmetic is not None
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Sigmoid(), nn.Conv2d(8, 4, 1)).eval()
    x = images()
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    layer: Any = model[1]
    assert layer.rounded_by == "2.input_quantizer"
    grid = layer.input_quantizer.qparams()
    to = model[2].input_quantizer.qparams()
    table = runtime.arithmetic.operators.sigmoid(grid, to)
    codes = torch.arange(256) - grid.zero_point
    exact = (codes.double() * float(grid.scale)).sigmoid() / float(to.scale)
    away = ((exact % 1) - 0.5).abs() > 1e-4
    expected = exact.round() + to.zero_point
    assert int(away.sum()) > 250
    assert torch.equal(
        (table + to.zero_point)[away], expected[away].clamp(0, 255).float()
    )
    values = codes.float() * grid.scale
    assert torch.equal(evaluated(layer, values), table * to.scale)


def test_a_number_that_is_none_stays_none() -> None:
    """In every kind of operator, for one image; another one is what it was, and so is none."""
    layers = (
        *(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.AvgPool2d(2), nn.Conv2d(8, 8, 1)),
        *(nn.Sigmoid(), nn.Conv2d(8, 4, 1)),
    )
    model = nn.Sequential(*layers).eval()
    x = images()
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], correct=False, progress=False)
    assert all(layer.rounded_by for layer in model[:5])
    expected = evaluated(model, x)
    x[0] = torch.nan
    actual = evaluated(model, x)
    assert bool(actual[0].isnan().all())
    assert torch.equal(actual[1:], expected[1:])
    assert evaluated(model, x[:0]).shape == (0, *expected.shape[1:])


def test_sums_are_scaled_in_one_product() -> None:
    """Scaled to values first, and to codes then, one of a thousand is another code."""
    runtime = torchq.runtimes.RUNTIMES["onnxruntime"]
    assert runtime.arithmetic is not None
    scales = (
        torch.rand(2, 64, 1, generator=torch.Generator().manual_seed(0)) * 0.01 + 1e-4
    )
    step = scales[0]
    to = scales[1]
    sums = torch.arange(-30_000.0, 30_000.0).expand(64, -1)
    actual = runtime.arithmetic.code_biases.rounds_products(step, to)(sums.clone())
    factor = step.numpy() / to.numpy()
    assert torch.equal(actual, torch.from_numpy((sums.numpy() * factor).round()) * to)
    in_two_steps = (sums * step).div_(to).round_().mul_(to)
    assert 0 < int((actual != in_two_steps).sum()) < 0.01 * sums.numel()


def test_kept_numbers_are_made_again_where_one_is_another() -> None:
    kept: KeptNumbers[int] = KeptNumbers()
    numbers = torch.arange(4.0)
    made = iter(range(9))
    settings = (object(),)
    assert [
        kept.get(settings, (numbers, None), lambda: next(made)) for _ in range(3)
    ] == [0] * 3
    numbers.data[2] = torch.nextafter(
        numbers[2],
        torch.tensor(9.0),
    )
    assert kept.get(settings, (numbers, None), lambda: next(made)) == 1
    assert kept.get((object(),), (numbers, None), lambda: next(made)) == 2
    assert kept.get(settings, (numbers.double(), None), lambda: next(made)) == 3
    assert kept.get(settings, (numbers[:3], None), lambda: next(made)) == 4
    assert kept.get(settings, (numbers[:3], numbers), lambda: next(made)) == 5
    assert (
        copy.deepcopy(kept).get(settings, (numbers[:3], numbers), lambda: next(made))
        == 6
    )
