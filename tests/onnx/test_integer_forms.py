"""What a plan says that ONNX Runtime computes on integers, it does, and evaluation too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.integer_forms import FORMS, Case
from torchq.formats import UINT8
from torchq.functional import QParams
from torchq.functional.windows import windows_of_call
from torchq.nn.integer_kernel import kernels_off
from torchq.onnx.ir import load_model
from torchq.runtime import open_session

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

RECIPES: dict[str, Callable[[], torchq.QuantConfig]] = {
    "int8": torchq.recipes.int8,
    "zero points": lambda: torchq.recipes.int8(symmetric=False),
    "4 bits": lambda: torchq.recipes.integer(4, 8),
}


def calibrated(case: Case, recipe: str) -> tuple[nn.Module, Tensor, torchq.swap.Plan]:
    """Return a network of a form for ONNX Runtime, images, and its plan."""
    model = case.model()
    dims = getattr(model, "dims", 2)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(32, 3, *[12] * dims, generator=generator)
    plan = torchq.quantize_(
        model,
        RECIPES[recipe](),
        target="onnxruntime",
        example=x[:2],
        progress=False,
    )
    torchq.calibrate(model, [x], progress=False)
    return model, x, plan


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore:.*only .* quantized", "ignore:export_onnx")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_plan_file_and_evaluation_agree(form: str, recipe: str, tmp_path: Path) -> None:
    """The plan knows the kernel, a session has it, and results are equal to the last bit."""
    case = FORMS[form]
    model, x, plan = calibrated(case, recipe)
    path = tmp_path / "model.onnx"
    torchq.export_onnx(model, x[:2], path, dynamo=False, progress=False)
    session = open_session(path, optimize=True, save_optimized=tmp_path / "o.onnx")
    operators = Counter(
        node.op_type for node in load_model(tmp_path / "o.onnx", check=False).graph
    )
    decision = plan.decision(case.operator)
    assert decision is not None
    assert not decision.reason
    is_rounded = bool(case.kernel) and case.is_rounded
    assert bool(decision.rounded_by) is is_rounded
    # Beside that of the form: the two convolutions, or one, and the linear layers.
    assert operators[case.kernel] >= (3 if case.kernel == "QLinearConv" else 1) or (
        not case.kernel or _has_one_convolution(model, operators)
    )
    with torch.no_grad():
        actual = model(x)
        other = model(x[:5])
    expected = session.run(session.feeds({"x": x}))[0]
    if case.kernel:
        assert torch.equal(actual, expected)
        assert torch.equal(other, expected[:5])
    else:  # An island of floats: codes behind it may be one off, each of few.
        differ = ((actual - expected).abs() > 1e-4 * expected.abs().max()).float()
        assert float(differ.mean()) < 0.1


def _has_one_convolution(model: nn.Module, operators: Counter[str]) -> bool:
    """Return True for a network without a second convolution, whose pool is one in the file."""
    return not isinstance(getattr(model, "last", None), nn.Conv2d) and (
        operators["QLinearConv"] == 2
    )


@pytest.mark.parametrize("form", ["mean", "product", "conv2d", "linear", "uncounted"])
def test_a_form_that_simulates_is_seen(form: str) -> None:
    """With its own kernel off alone, or one bias or scale changed, what it returns is another."""
    model, x, _ = calibrated(FORMS[form], "int8")
    layer: Any = model.get_submodule(FORMS[form].operator)
    results: list[Tensor] = []
    reader = layer.integer_kernel.result
    handle = reader.register_forward_pre_hook(lambda _, args: results.append(args[0]))
    with torch.no_grad():
        model(x)
        with kernels_off(layer):
            model(x)
    handle.remove()
    exact, simulated = results
    step = reader.scale
    assert torch.equal((exact / step).round() * step, exact)
    assert not torch.equal((simulated / step).round() * step, simulated)
    torch.testing.assert_close(simulated, exact, rtol=0, atol=0.51 * float(step))


def a_bias_by_one(model: Any) -> None:
    holder = model.weight_call
    step = holder.input_quantizer.scale * holder.weight_quantizer.scale.flatten()
    model.bias.data[0] += step[0]


def a_weight_in_place(model: Any) -> None:
    model.weight.data[0, 0, 0, 0] += (
        4 * model.weight_call.weight_quantizer.scale[0, 0, 0, 0]
    )


def the_last_bit_of_a_scale(model: Any) -> None:
    quantizer = model.weight_call.weight_quantizer
    quantizer.amax = quantizer.amax.nextafter(torch.tensor(torch.inf))


def the_range_of_the_input(model: Any) -> None:
    quantizer = model.weight_call.input_quantizer
    quantizer.range = quantizer.range.map(lambda end: end * 1.01)


@pytest.mark.parametrize(
    "change",
    [
        a_bias_by_one,
        a_weight_in_place,
        the_last_bit_of_a_scale,
        the_range_of_the_input,
    ],
)
def test_what_changes_a_call_changes_its_numbers(
    change: Callable[[Any], None],
) -> None:
    """Numbers are kept between calls; the rule of the kernel, from the numbers as they are now."""
    model, x, _ = calibrated(FORMS["conv2d"], "int8")
    layer: Any = model.get_submodule("weight_call")
    reader = layer.integer_kernel.result
    results: list[Tensor] = []
    inputs: list[Tensor] = []
    reader.register_forward_pre_hook(lambda _, args: results.append(args[0]))
    model.stem.register_forward_hook(lambda _, args, out: inputs.append(out.relu()))
    with torch.no_grad():
        model(x)
        change(model)
        model(x)
    before, after = results
    given = inputs[1]
    of_input = layer.input_quantizer
    of_weight = layer.weight_quantizer
    step = of_input.scale.reshape(()) * of_weight.scale.flatten()
    bias = (model.bias.detach() / step).round()
    codes = of_input.codes(given) - of_input.qparams().zero_point
    sums = F.conv2d(
        codes.double(),
        of_weight.codes(model.weight.detach()).double(),
        bias.double(),
        padding=1,
    )
    factor = step / reader.scale.reshape(())
    expected = (sums.float() * factor[:, None, None]).round() * reader.scale.reshape(())
    assert torch.equal(after, expected.relu())
    # The last bit of a scale turns no code over here: the factors themselves tell.
    assert change is the_last_bit_of_a_scale or not torch.equal(before, after)


def test_a_graph_of_torch_fx_has_no_function_on_integers() -> None:
    """Nothing stands for a function there, so the plan says nothing of it."""
    torch.manual_seed(0)
    model = torch.fx.symbolic_trace(FORMS["mean"].model())
    x = torch.randn(4, 3, 12, 12)
    plan = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    pools = [d for d in plan.replaced if d.class_name == "Tap"]
    assert [d.rounded_by for d in pools] == [""]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mean", "conv2d", "linear", "product"])
def test_an_exported_form_simulates(form: str) -> None:
    """Also behind a forward without gradients, which has numbers kept."""
    model, x, _ = calibrated(FORMS[form], "int8")
    with torch.enable_grad():
        simulated = model(x).detach()
    with torch.no_grad():
        assert not torch.equal(model(x), simulated)
        exported = torch.export.export(model, (x,), strict=False).module()
        torch.testing.assert_close(exported(x), simulated, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4, 3, 12, 12), (4, 3, 14, 9), (0, 3, 12, 12)])
def test_other_shapes_than_the_example_compute_too(shape: tuple[int, ...]) -> None:
    model, _, _ = calibrated(FORMS["function of windows"], "int8")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        actual = model(x)
        last = model(x.contiguous(memory_format=torch.channels_last))
    assert actual.shape == (shape[0], 5)
    assert torch.equal(actual, last)
    with torch.enable_grad():
        simulated = model(x).detach()
    torch.testing.assert_close(actual, simulated, rtol=0.1, atol=0.1)


# --- formulas -----------------------------------------------------------------------------------


def node_session(
    operator: str, attributes: dict[str, Any], grids: list[QParams], *inputs: Tensor
) -> Tensor:
    """Return the codes that a node between Q/DQ pairs gives in a default session."""
    helper = onnx.helper
    types = onnx.TensorProto
    names = [*(f"x{i}" for i in range(len(inputs))), "y"]
    stored = []
    for name, grid in zip(names, grids, strict=True):
        stored.append(
            helper.make_tensor(f"{name}_s", types.FLOAT, [], [float(grid.scale)])
        )
        stored.append(
            helper.make_tensor(f"{name}_z", types.UINT8, [], [int(grid.zero_point)])
        )
    nodes = [
        helper.make_node("DequantizeLinear", [n, f"{n}_s", f"{n}_z"], [f"{n}_f"])
        for n in names[:-1]
    ]
    floats = [f"{name}_f" for name in names[:-1]]
    nodes.append(helper.make_node(operator, floats, ["r"], **attributes))
    nodes.append(helper.make_node("QuantizeLinear", ["r", "y_s", "y_z"], ["y"]))
    values = [
        helper.make_tensor_value_info(n, types.UINT8, list(x.shape))
        for n, x in zip(names, inputs, strict=False)
    ]
    result = helper.make_tensor_value_info("y", types.UINT8, None)
    graph = helper.make_graph(nodes, "g", values, [result], stored)
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {n: x.numpy() for n, x in zip(names, inputs, strict=False)}
    return torch.from_numpy(session.run(None, feeds)[0])


def grids_of(ratio: float, seed: int) -> tuple[QParams, QParams]:
    """Return two grids of bytes, the scale of the second ``ratio`` times the other's."""
    numbers = np.random.default_rng(seed)
    scale = torch.tensor(numbers.uniform(0.01, 0.1), dtype=torch.float32)
    points = torch.from_numpy(numbers.integers(0, 256, 2))
    return (
        QParams(scale, points[0], UINT8),
        QParams(scale * ratio, points[1], UINT8),
    )


#: ONNX's attributes of windows -> the arguments of torch's function.
WINDOWS = {
    "avg_pool1d": ({"kernel_shape": [4], "strides": [2]}, (4, 2)),
    "avg_pool2d": (
        {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]},
        (2, 2, 1, False, False),
    ),
    "avg_pool3d": ({"kernel_shape": [2, 2, 2], "strides": [2, 2, 2]}, (2,)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_averages_of_values_follow_the_kernel(name: str) -> None:
    """With equal scales, and one half of the other, which give ties in most windows."""
    arithmetic = torchq.runtimes.RUNTIMES["onnxruntime"].arithmetic
    assert arithmetic is not None
    attributes, arguments = WINDOWS[name]
    dims = int(name[-2])
    differ_otherwise = 0
    for seed, ratio in enumerate((1.0, 0.5, 0.77)):
        of, to = grids_of(ratio, seed)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(0, 256, (4, 8, *[8] * dims), generator=generator)
        x = x.to(torch.uint8)
        expected = node_session("AveragePool", attributes, [of, to], x)
        windows = windows_of_call(name, arguments, {}, x.shape)
        assert windows is not None
        codes = x.float() - float(of.zero_point)
        actual = (
            arithmetic.operators.averages(of, to, windows)(codes.clone()) / to.scale
        )
        point = float(to.zero_point)
        assert torch.equal(
            (actual.round() + point).clamp(0, 255),
            expected.float(),
        )
        means = windows.sums(codes * of.scale) / windows.counts(codes)
        later = ((means / to.scale).round() + point).clamp(0, 255)
        differ_otherwise += int((later != expected).sum())
    assert differ_otherwise > 0  # The zero point added behind the rounding shows.


@pytest.mark.parametrize(
    "shapes", [((64, 8, 5, 5), (64, 8, 1, 1)), ((8, 1), (64, 8, 5))]
)
def test_a_number_that_repeats_is_the_second_operand(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """A kernel exchanges the operands of a sum where the first is a single number."""
    first, second, to = (grids_of(1.0, seed)[0] for seed in (1, 2, 3))
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randint(0, 256, s, generator=generator).to(torch.uint8) for s in shapes
    )
    add = torchq.nn.QuantAdd()
    after = torchq.TensorQuantizer(_BYTES)
    add.input_quantizer = torchq.TensorQuantizer(_BYTES)
    add.other_quantizer = torchq.TensorQuantizer(_BYTES)
    for quantizer, grid in zip(
        (add.input_quantizer, add.other_quantizer, after),
        (first, second, to),
        strict=True,
    ):
        quantizer.set_qparams(grid.scale, grid.zero_point)
    add.rounded_by = "after"
    add.integer_kernel = torchq.nn.integer_kernel.IntegerKernel("onnxruntime", after)
    add.eval()
    values = (
        (x.float() - float(first.zero_point)) * first.scale,
        (y.float() - float(second.zero_point)) * second.scale,
    )
    with torch.no_grad():
        actual = after.codes(add(*values))
    expected = node_session("Add", {}, [first, second, to], x, y)
    assert torch.equal(actual, expected.float())


_BYTES = torchq.QuantDescriptor(8, symmetric=False, unsigned=True)


@pytest.mark.parametrize("largest", [100, 600])
def test_products_of_two_tensors_are_added_exactly(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 257 products of two bytes float32 would round; a kernel that does is gone around."""
    generator = torch.Generator().manual_seed(0)
    of = torchq.TensorQuantizer(_BYTES).eval()
    of.set_qparams(torch.tensor(1.0), torch.tensor(0))
    product: Any = torchq.nn.QuantMatMul()
    product.input_quantizer = product.other_quantizer = of
    product.integer_kernel = torchq.nn.integer_kernel.IntegerKernel("onnxruntime")
    product.eval()
    x, y = (
        torch.randint(200, 256, shape, generator=generator).float()
        for shape in ((2, 7, largest), (2, largest, 5))
    )
    expected = (x.long() @ y.long()).float()
    with torch.no_grad():
        assert torch.equal(product(x, y), expected)
    plain = Tensor.__matmul__
    calls: list[torch.dtype] = []

    def rounds(x: Tensor, y: Tensor) -> Tensor:
        calls.append(x.dtype)
        result = plain(x, y)
        return result * (1 + 2**-22) if x.dtype is torch.float32 else result

    monkeypatch.setattr(Tensor, "__matmul__", rounds)
    other = torch.cat([x, x])
    with torch.no_grad():
        assert torch.equal(
            product(other, y.repeat(2, 1, 1)),
            torch.cat([expected] * 2),
        )
        calls.clear()
        assert torch.equal(
            product(other, y.repeat(2, 1, 1)),
            torch.cat([expected] * 2),
        )
    assert calls == [torch.float64]


class OwnParameters(nn.Module):
    """Calls a convolution as a function with the parameters of a layer, in one of these ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.conv = nn.Conv2d(3, 16, 3)
        self.last = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        if self.way == "alone":
            features = F.conv2d(x, weight, bias)
        elif self.way == "twice":
            features = F.conv2d(x, weight, bias) + F.conv2d(2 * x, weight, bias)
        elif self.way == "beside the layer":
            features = self.conv(x) + F.conv2d(x, weight, bias)
        else:
            features = F.conv2d(x, weight)
        return self.last(features.relu()).mean((2, 3))


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
@pytest.mark.parametrize(
    "way", ["alone", "twice", "beside the layer", "without the bias"]
)
def test_calls_with_the_parameters_of_a_layer(
    way: str, target: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = OwnParameters(way).eval()
    batches = [torch.randn(8, 3, 24, 24) for _ in range(2)]
    torchq.quantize_(model, target=target, example=batches[0], progress=False)
    torchq.calibrate(model, batches, progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, batches[0], path, dynamo=False, progress=False)
    report = torchq.verify_onnx(model, path, batches, progress=False)
    assert report.ok, report
    rounded = {row.name for row in report.layers if row.name.endswith("bias")}
    assert ("conv.bias" in rounded) == (way != "without the bias")
