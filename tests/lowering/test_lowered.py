"""What networks become: a module goes in, and one line says what runs instead.

In a line ``Int8Conv`` computes on codes; behind its name stand the activation that its kernel
applies and ``u8`` where its result is codes. ``Quantize`` and ``Dequantize`` show the rest.
"""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import recipe, sqnr
from tests.models import simulated
from torchq.lowering import Int8Layer
from torchq.lowering.codes import Quantize
from torchq.lowering.match import is_inactive_dropout


class Net(nn.Module):
    """A forward over named modules."""

    def __init__(
        self, forward: Callable[..., Any], modules: dict[str, nn.Module]
    ) -> None:
        super().__init__()
        self._function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


def line(model: fx.GraphModule) -> str:
    """What a deployed graph returns, as nested calls of classes and functions."""
    modules = dict(model.named_modules(remove_duplicate=False))

    def text(value: object) -> str:
        if isinstance(value, (list, tuple)):
            return "[" + ", ".join(map(text, value)) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k}: {text(v)}" for k, v in value.items()) + "}"
        if not isinstance(value, fx.Node):
            return repr(value)
        if value.op == "placeholder":
            return str(value.target)
        if value.op == "output":
            return text(value.args[0])
        name = getattr(value.target, "__name__", str(value.target))
        if value.op == "call_module":
            module = modules[str(value.target)]
            name = type(module).__name__
            if isinstance(module, Int8Layer):
                name += "" if module.activation == "none" else f".{module.activation}"
                name += "" if module.output_qparams is None else ".u8"
            name += ".finite" * (isinstance(module, Quantize) and module.finite)
        return f"{name}({', '.join(map(text, value.args))})"

    *_, output = model.graph.nodes
    return text(output)


def conv(*args: Any, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(4, 4, *(args or (1,)), **options)


class DropPath(nn.Module):
    """Foreign code that drops samples while training."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1, 1) > 0.5) if self.training else x


class Half(nn.Module):
    """Foreign code that does something in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x / 2


A = {"a": conv()}
B = {"a": conv(), "b": conv()}
Q = {"q": torchq.TensorQuantizer()}
CASES: dict[str, tuple[dict[str, nn.Module], Callable[..., Any], str]] = {
    # Activations and clamps between layers.
    "relu": (
        B,
        lambda m, x: m.b(F.relu(m.a(x))),
        "Int8Conv(Int8Conv.clamp.u8(Quantize(x)))",
    ),
    "relu6 module": (
        {**B, "c": nn.ReLU6()},
        lambda m, x: m.b(m.c(m.a(x))),
        "Int8Conv(Int8Conv.clamp.u8(Quantize(x)))",
    ),
    "silu": (
        {**B, "c": nn.SiLU()},
        lambda m, x: m.b(m.c(m.a(x))),
        "Int8Conv(Int8Conv.silu.u8(Quantize(x)))",
    ),
    "gelu of a convolution": (
        {**A, "c": nn.GELU()},
        lambda m, x: m.c(m.a(x)),
        "GELU(Int8Conv(Quantize(x)))",
    ),
    "gelu of a linear layer": (
        {"a": nn.Linear(6, 6), "c": nn.GELU()},
        lambda m, x: m.c(m.a(x)),
        "Int8Linear.gelu(Quantize(x))",
    ),
    "clamp with another reader": (
        A,
        lambda m, x: [m.a(z := F.relu(x)), z],
        "[Int8Conv(Quantize(relu(x))), relu(x)]",
    ),
    # BatchNorm and sums.
    "norm": (
        {**B, "n": nn.BatchNorm2d(4)},
        lambda m, x: m.b(F.relu(m.n(m.a(x)))),
        "Int8Conv(Quantize(BatchNorm2d(Int8Conv(Quantize(x)))))",
    ),
    "sum": (
        B,
        lambda m, x: m.b(F.relu(m.a(x) + x)),
        "Int8Conv(Quantize(add(Int8Conv(Quantize(x)), x)))",
    ),
    "quantized sum in place": (
        {**B, **Q},
        lambda m, x: m.b(operator_iadd(m.a(x), m.q(x))),
        "Int8Conv(Int8Conv.u8(Quantize(x), Quantize(x)))",
    ),
    "quantized sum": (
        {**B, **Q},
        lambda m, x: m.b(F.relu(m.a(x) + m.q(x))),
        "Int8Conv(Int8Conv.u8(Quantize(x), Quantize(x)))",
    ),
    "quantized operands": (
        {**A, "s": torchq.nn.Add()},
        lambda m, x: m.s(m.a(x), x),
        "add(Dequantize(Int8Conv.u8(Quantize(x))), Dequantize(Quantize(x)))",
    ),
    "sum of two convolutions": (
        {"a": conv(3, 1, 1), **Q, "b": conv(), "c": conv()},
        lambda m, x: m.c(m.q(m.b(x)) + m.a(x)),
        "Int8Conv(Int8Conv.u8(Quantize(x), Int8Conv.u8(Quantize(x))))",
    ),
    "sum of linear layers": (
        {"a": nn.Linear(6, 6)},
        lambda m, x: x + m.a(x),
        "add(x, Int8Linear(Quantize(x)))",
    ),
    # What codes pass through.
    "max pool": (
        B,
        lambda m, x: m.b(F.max_pool2d(F.relu(m.a(x)), 2)),
        "Int8Conv(CodesMaxPool2d(Int8Conv.clamp.u8(Quantize(x))))",
    ),
    "global mean": (
        {**B, **Q},
        lambda m, x: m.b(F.adaptive_avg_pool2d(m.q(m.a(x)), output_size=1)),
        "Int8Conv(CodesAvgPool2d(Int8Conv.u8(Quantize(x))))",
    ),
    "average pool of values": (
        {**B, "p": nn.AvgPool2d(2)},
        lambda m, x: m.b(m.p(m.a(x))),
        "Int8Conv(CodesAvgPool2d(Int8Conv.u8(Quantize(x))))",
    ),
    "view": (
        {**A, "l": nn.Linear(36 * 4, 3)},
        lambda m, x: m.l(m.a(x).view(2, -1)),
        "Int8Linear(reshape(Int8Conv.u8(Quantize(x)), 2, -1))",
    ),
    "view of bits": (
        A,
        lambda m, x: m.a(x).view(torch.int32),
        "view(Int8Conv(Quantize(x)), torch.int32)",
    ),
    "nearest": (
        B,
        lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=2)),
        "Int8Conv(interpolate(Int8Conv.u8(Quantize(x))))",
    ),
    "bilinear": (
        B,
        lambda m, x: m.b(F.interpolate(m.a(x), scale_factor=2, mode="bilinear")),
        "Int8Conv(Quantize(interpolate(Int8Conv(Quantize(x)))))",
    ),
    "concatenation": (
        {**B, "c": nn.Conv2d(8, 4, 1)},
        lambda m, x: m.c(torch.cat([F.relu(m.a(x)), m.b(x)], 1)),
        "Int8Conv(cat([Int8Conv.clamp.u8(Quantize(x)), Int8Conv.u8(Quantize(x))], 1))",
    ),
    "quantized concatenation": (
        {**B, "c": torchq.nn.Cat(), "d": nn.Conv2d(8, 4, 1)},
        lambda m, x: m.d(m.c([m.a(x), m.b(x)], dim=1)),
        "Int8Conv(cat([Int8Conv.u8(Quantize(x)), Int8Conv.u8(Quantize(x))], 1))",
    ),
    "chunk": (
        {"a": conv(), "c": nn.Conv2d(2, 2, 1)},
        lambda m, x: m.c(m.a(x).chunk(2, dim=1)[1]),
        "Int8Conv(nth_chunk(Int8Conv.u8(Quantize(x)), 'chunk', 1, 2))",
    ),
    "shape of codes": (
        {**B, **Q},
        lambda m, x: m.b(z := m.q(m.a(x))).reshape(z.size(0), -1),
        "reshape(Int8Conv(Int8Conv.u8(Quantize(x))), size(Int8Conv.u8(Quantize(x)), 0), -1)",
    ),
    # What drops out, and what has to stay.
    "identity": (
        {**B, "d": nn.Dropout(), "i": nn.Identity()},
        lambda m, x: m.b(m.i(m.d(m.a(x)))),
        "Int8Conv(Int8Conv.u8(Quantize(x)))",
    ),
    "drop path": (
        {**B, "d": DropPath()},
        lambda m, x: m.b(m.d(m.a(x))),
        "Int8Conv(Int8Conv.u8(Quantize(x)))",
    ),
    "half": (
        {**B, "d": Half()},
        lambda m, x: m.b(m.d(m.a(x))),
        "Int8Conv(Quantize(Half(Int8Conv(Quantize(x)))))",
    ),
    "active dropout": (
        A,
        lambda m, x: F.dropout(m.a(x), 0.0, True),
        "dropout(Int8Conv(Quantize(x)))",
    ),
    "quantizer of the author": (
        {**A, **Q},
        lambda m, x: m.q(m.a(x)),
        "Dequantize(Int8Conv.u8(Quantize(x)))",
    ),
    "gate": (
        {**B, "c": conv(), "s": nn.Sigmoid()},
        lambda m, x: m.c(m.a(x) * m.s(F.adaptive_avg_pool2d(m.b(x), 1))),
        "Int8Conv(Quantize.finite(mul(Int8Conv(Quantize(x)), "
        "Sigmoid(adaptive_avg_pool2d(Int8Conv(Quantize(x)), 1)))))",
    ),
    "quotient": (
        {**B, "c": conv()},
        lambda m, x: m.c(m.a(x) / (m.b(x).abs() + 1)),
        "Int8Conv(Quantize(truediv(Int8Conv(Quantize(x)), add(abs(Int8Conv(Quantize(x))), 1))))",
    ),
    "dynamic quantizer": (
        {**A, "q": torchq.TensorQuantizer(torchq.QuantDescriptor(dynamic=True))},
        lambda m, x: m.q(m.a(x)),
        f"{torchq.TensorQuantizer.__name__}(Int8Conv(Quantize(x)))",
    ),
    "dictionary": (
        A,
        lambda m, x: OrderedDict(a=m.a(x)),
        "OrderedDict({a: Int8Conv(Quantize(x))})",
    ),
    "shared layer": (
        A,
        lambda m, x: m.a(F.relu(m.a(x))),
        "Int8Conv(Int8Conv.clamp.u8(Quantize(x)))",
    ),
}


def operator_iadd(x: Tensor, y: Tensor) -> Tensor:
    x += y
    return x


def deployed(name: str) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    modules, forward, _ = CASES[name]
    x = torch.randn(2, 4, 6, 6)
    model = Net(forward, copy.deepcopy(modules)).eval()
    input = torchq.QuantDescriptor()
    kinds = {type(m) for m in model.modules()} & {
        torchq.nn.Add,
        torchq.nn.Cat,
        nn.AvgPool2d,
    }
    rules = [torchq.Rule(kind, input=input) for kind in kinds if name != "average pool"]
    simulated(model, [x], recipe().with_rules(*rules))
    return model, torchq.deploy(model), x


@pytest.mark.sample(20)
@pytest.mark.parametrize("name", CASES)
def test_a_network_becomes_what_the_table_says(name: str) -> None:
    model, lowered, x = deployed(name)
    assert isinstance(lowered, fx.GraphModule)
    assert line(lowered) == CASES[name][2]
    for twin in (lowered, copy.deepcopy(lowered), pickle.loads(pickle.dumps(lowered))):
        for got, expected in zip(results(twin(x)), results(model(x)), strict=True):
            # Where float32 rounds a tie the other way a code moves by one.
            assert sqnr(got, expected) > 40


def results(found: Any) -> list[Tensor]:
    """The floating-point tensors of a result."""
    found = [*found.values()] if isinstance(found, dict) else found
    tensors = found if isinstance(found, list) else [found]
    return [x.view(torch.float32) for x in tensors]


def test_a_layer_that_two_nodes_call_has_an_epilogue_for_each() -> None:
    _, lowered, _ = deployed("shared layer")
    layers = [m for m in lowered.modules() if isinstance(m, Int8Layer)]
    assert sorted(layer.activation for layer in layers) == ["clamp", "none"]
    assert layers[0].kernel is layers[1].kernel  # one packed weight


@pytest.mark.parametrize(
    ("unsigned", "codes"),
    [(False, (0, 12)), ("auto", (0, 24))],
)
def test_a_clamp_becomes_bounds_of_codes(unsigned: Any, codes: tuple[int, int]) -> None:
    """The codes of values that are never negative start at 0, on ranges of either kind."""
    model = simulated(
        Net(lambda m, x: m.b(F.relu6(m.a(x))), copy.deepcopy(B)).eval(),
        [torch.randn(2, 4, 6, 6)],
        torchq.recipes.integer(7, 8, unsigned=unsigned),
    )
    model.b.input_quantizer.set_amax(63.5)  # type: ignore[union-attr, operator]
    layer = torchq.deploy(model).get_submodule("a")
    assert isinstance(layer, Int8Layer)
    assert layer.output_qparams is not None
    actual = layer.output_qparams
    assert (actual.zero_point, actual.quant_min, actual.quant_max) == (0, *codes)


@pytest.mark.parametrize(
    ("arguments", "keywords", "inactive"),
    [
        ((0.5, False), {}, True),
        ((0.5,), {"training": False}, True),
        ((), {"p": 0.5, "training": False}, True),
        ((0.5, True), {}, False),
        ((0.5,), {}, False),
    ],
)
def test_a_dropout_that_is_off_is_known_however_it_was_called(
    arguments: tuple[Any, ...], keywords: dict[str, Any], inactive: bool
) -> None:
    graph = fx.Graph()
    node = graph.call_function(
        F.dropout, (graph.placeholder("x"), *arguments), keywords
    )
    assert is_inactive_dropout(node) is inactive
