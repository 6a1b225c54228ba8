"""Backends: handlers in a graph, and the integer arithmetic of torchq's own, in Python integers."""

from __future__ import annotations

import itertools
import math
import threading
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.reference import rounded
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError, GraphError
from torchq.graph import GraphRunner, trace
from torchq.nn import TensorQuantizer
from torchq.runtimes.emulation import (
    Backend,
    NodeCall,
    fixed_point,
    integer_average_pooling,
    multiply,
    quantize_multiplier,
    shift_leaky_relu,
)

AFFINE = QuantDescriptor(symmetric=False)


def quantized(
    *layers: nn.Module, x: Tensor, input: QuantDescriptor | None = None, **rules: Any
) -> nn.Sequential:
    """Return a calibrated model; layers with weights and those in ``rules`` have quantizers."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers).eval()
    input = input or QuantDescriptor()
    config = QuantConfig(
        (
            Rule(
                "type:Conv2d",
                input=input,
                weight=QuantDescriptor(axis=0),
                optional=True,
            ),
            Rule("type:Linear", input=input, weight=QuantDescriptor(), optional=True),
            *(Rule(f"type:{kind}", input=d) for kind, d in rules.items()),
        )
    )
    torchq.quantize_(model, config)
    torchq.calibrate(model, [x], correct=False, progress=False)
    return model


def runner(model: nn.Module, x: Tensor) -> GraphRunner:
    return GraphRunner(trace(model, x).graph_module)


def codes(x: Tensor, quantizer: TensorQuantizer) -> list[int]:
    """Return the codes of values on the grid of a quantizer."""
    scale, zero_point = quantizer.calculate_qparams()
    return (
        ((x.detach().double() / scale.double()).round() + zero_point)
        .long()
        .flatten()
        .tolist()
    )


def test_handlers_of_functions_methods_and_modules(generator: torch.Generator) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.act(x).relu())

    seen: list[tuple[str, bool]] = []

    def handler(call: NodeCall, x: Tensor) -> Tensor:
        seen.append((call.node.op, call.module is not None))
        return call.default(x) + 1

    backend = Backend().register("relu", handler)
    run = runner(Net(), torch.zeros(2))
    assert run.run(torch.zeros(2), backend=backend).tolist() == [3.0, 3.0]
    assert seen == [
        ("call_module", True),
        ("call_method", False),
        ("call_function", False),
    ]
    assert run.run(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_handlers_form_a_chain() -> None:
    first = Backend().register("relu", lambda call, x: call.default(x) * 2)
    second = Backend().register("relu", lambda call, x: call.default(x) + 1)
    run = runner(
        nn.Sequential(nn.ReLU()),
        torch.ones(1),
    )
    assert run.run(torch.ones(1), backend=second.over(first)).item() == 3.0
    assert run.run(torch.ones(1), backend=first.over(second)).item() == 4.0
    assert run.run(torch.ones(1), backend=first).item() == 2.0


def test_threads_may_use_different_backends() -> None:
    run = runner(
        nn.Sequential(*[nn.ReLU() for _ in range(20)]),
        torch.ones(1),
    )
    results: dict[int, float] = {}

    def work(number: int) -> None:
        backend = Backend().register("relu", lambda call, x: call.default(x) + number)
        results[number] = run.run(torch.ones(1), backend=backend).item()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: 1.0 + 20 * number for number in range(6)}


@pytest.mark.parametrize("name", ["relu", "relu_", "ReLU"])
def test_an_operation_has_its_handler_by_any_name_of_torch(name: str) -> None:
    backend = Backend().register(name, lambda call, x: call.default(x) + 1)
    run = runner(
        nn.Sequential(nn.ReLU()),
        torch.zeros(1),
    )
    assert run.run(torch.zeros(1), backend=backend).item() == 1.0
    assert len(backend.handlers("relu")) == len(backend.handlers(name)) == 1


def test_names_that_look_like_a_slip_are_warned_of() -> None:
    def handler(call: NodeCall, x: Tensor) -> Tensor:
        return call.default(x)

    with pytest.warns(
        UserWarning, match=r"'leaky_rellu', so .*'leaky_relu' may be meant"
    ):
        backend = Backend().register("leaky_rellu", handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("roi_align", "MyBlock", "LayerNorm", "add", "_softmax"):
            backend.register(name, handler)
        backend.over(Backend())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        ConfigError, match="got the handler 3 for 'relu'; expected a function"
    ):
        Backend().register("relu", 3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"got the operation .*; expected its name"):
        Backend().register(nn.ReLU, lambda call, x: x)  # type: ignore[arg-type]


def test_delegates(generator: torch.Generator) -> None:
    x = torch.randn(4, 3, generator=generator)
    model = quantized(nn.Linear(3, 2), x=x)
    before = model(x)
    model[0].input_quantizer.delegate = lambda x, quantizer: x
    assert torch.equal(model[0].input_quantizer(x), x)
    assert not torch.equal(model(x), before)
    model[0].input_quantizer.delegate = None
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize(
    "descriptor", [QuantDescriptor(), AFFINE], ids=["symmetric", "affine"]
)
def test_leaky_relu_shifts_codes(
    shift: int, descriptor: QuantDescriptor, generator: torch.Generator
) -> None:
    x = torch.randn(200, generator=generator)
    model = quantized(nn.LeakyReLU(0.1), x=x, LeakyReLU=descriptor)
    y = runner(model, x).run(x, backend=shift_leaky_relu(shift))
    q = model[0].input_quantizer
    zero_point = int(q.calculate_qparams()[1])
    before = [code - zero_point for code in codes(q(x), q)]
    expected = [code if code >= 0 else code >> shift for code in before]
    assert [code - zero_point for code in codes(y, q)] == expected
    assert min(expected) < 0
    with pytest.raises(ConfigError, match="got shift=0; expected 1 to 15"):
        shift_leaky_relu(0)


def test_what_is_not_quantized_is_left_to_torch(generator: torch.Generator) -> None:
    x = torch.randn(5, 2, 6, 6, generator=generator)
    model = nn.Sequential(
        nn.LeakyReLU(0.1),
        nn.AvgPool2d(2),
        nn.Conv2d(2, 3, 3),
    )
    backend = fixed_point().over(shift_leaky_relu()).over(integer_average_pooling())
    assert torch.equal(
        runner(model, x).run(x, backend=backend),
        model(x),
    )


@pytest.mark.parametrize(
    "descriptor", [QuantDescriptor(), AFFINE], ids=["symmetric", "affine"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_average_pooling_divides_integers(
    descriptor: QuantDescriptor, size: int, generator: torch.Generator
) -> None:
    x = torch.randn(2, 3, 6, 6, generator=generator)
    model = quantized(nn.AvgPool2d(size), x=x, AvgPool2d=descriptor)
    q = model[0].input_quantizer
    y = runner(model, x).run(x, backend=integer_average_pooling())
    grid = torch.tensor(codes(q(x), q)).view(x.shape)
    windows = grid.unfold(2, size, size).unfold(3, size, size).flatten(4).sum(-1)
    expected = [rounded(int(s) / size**2, "half_away") for s in windows.flatten()]
    assert codes(y, q) == expected
    adaptive = quantized(
        nn.AdaptiveAvgPool2d(6 // size), x=x, AdaptiveAvgPool2d=descriptor
    )
    again = runner(adaptive, x).run(x, backend=integer_average_pooling())
    assert torch.equal(again, y)


@pytest.mark.parametrize(
    "descriptor", [QuantDescriptor(), AFFINE], ids=["symmetric", "affine"]
)
def test_layers_are_those_of_integer_chips(
    descriptor: QuantDescriptor, generator: torch.Generator
) -> None:
    """Every code of a small network, from sums and multipliers in Python integers."""
    x = torch.randn(2, 2, 4, 4, generator=generator)
    layers = (nn.Conv2d(2, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 4))
    model = quantized(*layers, x=x, input=descriptor)
    run = runner(model, x)
    conv = model[0]
    linear = model[3]
    result = run.run(x, backend=fixed_point())
    q_in = conv.input_quantizer
    q_out = linear.input_quantizer
    z_in, z_out = (int(q.calculate_qparams()[1]) for q in (q_in, q_out))
    image = torch.tensor(codes(q_in(x), q_in)).view(x.shape) - z_in
    image = nn.functional.pad(image, [1, 1, 1, 1])
    weight = (conv.weight / conv.weight_quantizer.scale).round().long()
    s_in = float(q_in.scale)
    s_out = float(q_out.scale)
    hidden = torch.empty(2, 3, 5, 5, dtype=torch.int64)
    for n, o, i, j in itertools.product(range(2), range(3), range(5), range(5)):
        s_w = float(conv.weight_quantizer.scale.flatten()[o])
        total = int((image[n, :, i : i + 2, j : j + 2] * weight[o]).sum())
        total += rounded(
            float(conv.bias[o].detach().double() / (s_in * s_w)), "half_away"
        )
        code = tflite_multiply(total, s_in * s_w / s_out) + z_out
        hidden[n, o, i, j] = max(min(max(code, -128), 127), z_out)  # ReLU ends at zero.
    inner = run.run(
        x,
        outputs=linear_input(run),
        backend=fixed_point(),
    )
    assert codes(inner, q_out) == hidden.flatten().tolist()
    w = (linear.weight / linear.weight_quantizer.scale).round().long()
    s_w = float(linear.weight_quantizer.scale)
    bias = [
        rounded(float(b.double() / (s_out * s_w)), "half_away")
        for b in linear.bias.detach()
    ]
    sums = (hidden.flatten(1) - z_out) @ w.t() + torch.tensor(bias)
    assert torch.equal(result, (sums.double() * (s_out * s_w)).float())
    # And it is close to what torch simulates, but not the same.
    assert not torch.equal(result, model(x))
    assert torch.allclose(
        result,
        model(x),
        atol=3 * s_out * float(w.abs().max()) * s_w,
    )


def linear_input(run: GraphRunner) -> str:
    """Return the node of the last activation quantizer."""
    return [name for name in run.node_names if name.endswith("input_quantizer")][-1]


def test_sums_beyond_int32_are_an_error() -> None:
    x = torch.ones(1, 70000)
    layer = nn.Linear(70000, 1, bias=False)
    nn.init.ones_(layer.weight)
    model = quantized(layer, x=x, input=QuantDescriptor(9))
    model[0].weight_quantizer.descriptor = QuantDescriptor(9)
    model[0].weight_quantizer.calibrate_on(layer.weight)
    with pytest.raises(
        GraphError, match=r"got a sum of .*; expected sums within int32"
    ):
        runner(model, x).run(x, backend=fixed_point())


class Awkward(nn.Module):
    """Code that torch.fx cannot follow, with a sum in place and a LeakyReLU between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.act = nn.LeakyReLU(0.1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        if x.shape[2] > 4:
            x += self.second(x)
        return self.head(nn.functional.avg_pool2d(x, 2).mean((2, 3)))


class Plain(Awkward):
    """The same for torch.fx."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.first(x))
        x += self.second(x)
        return self.head(nn.functional.avg_pool2d(x, 2).mean((2, 3)))


def test_traces_of_operators_give_what_traces_of_modules_give(
    generator: torch.Generator,
) -> None:
    x = torch.randn(2, 3, 12, 12, generator=generator)
    given = QuantDescriptor()
    rules = [Rule("type:Conv2d", input=given, weight=QuantDescriptor(axis=0))]
    rules += [
        Rule("type:Linear", input=given, weight=given),
        Rule("type:LeakyReLU", input=given),
    ]
    results = []
    for cls, level in ((Awkward, "aten"), (Plain, "module")):
        torch.manual_seed(0)
        model = cls().eval()
        torchq.quantize_(model, QuantConfig(tuple(rules)))
        torchq.calibrate(model, [x], progress=False)
        actual = trace(model, x)
        assert actual.level == level
        run = GraphRunner(actual.graph_module)
        assert torch.equal(run.run(x), model(x))
        chip = fixed_point().over(shift_leaky_relu(3))
        results.append(run.run(x, backend=chip))
        assert not torch.equal(results[-1], model(x))
    assert torch.equal(*results)
    assert torch.allclose(results[0], model(x), atol=0.05)


@pytest.mark.parametrize("level", ["module", "aten"])
def test_quantizers_stay_calls_of_the_model(
    level: str, generator: torch.Generator
) -> None:
    """A delegate given after the trace counts in it."""
    x = torch.randn(2, 3, 12, 12, generator=generator)
    model = (Plain if level == "module" else Awkward)().eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    run = GraphRunner(trace(model, x).graph_module)
    before = run.run(x)
    model.second.input_quantizer.delegate = lambda x, quantizer: x * 0
    assert not torch.equal(run.run(x), before)
    assert torch.equal(run.run(x), model(x))


def test_operations_in_place_write_what_their_handlers_compute() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            self.act(y)
            y.relu_()
            nn.functional.relu(y, True)
            torch.relu_(y)
            return y

    seen = []

    def handler(call: NodeCall, x: Tensor, **options: Any) -> Tensor:
        seen.append(call.node.name)
        before = x.clone()
        result = call.default(x, **options) + 1
        return result + (before if call.node.op == "call_module" else 0)

    run = runner(Net(), torch.ones(2))
    assert (
        run.run(torch.ones(2), backend=Backend().register("relu", handler)).tolist()
        == [6.0] * 2
    )
    assert len(seen) == 4
    backend = Backend().register("add", lambda call, x, y: call.default(x, y) * 2)

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 1
            z = y
            z += x
            y.add_(x)
            return y

    assert (
        runner(Sums(), torch.ones(1)).run(torch.ones(1), backend=backend).item() == 10.0
    )


def tflite_multiplier(real: float) -> tuple[int, int]:
    """``QuantizeMultiplier`` of tensorflow/lite/kernels/internal/quantization_util.cc."""
    if real == 0.0:
        return 0, 0
    mantissa, shift = math.frexp(real)
    # Std::round of a positive.
    fixed = math.floor(Fraction(mantissa) * 2**31 + Fraction(1, 2))
    if fixed == 2**31:
        fixed, shift = fixed // 2, shift + 1
    return (0, 0) if shift < -31 else (fixed, shift)


def doubling_high_multiply(a: int, b: int) -> int:
    """``SaturatingRoundingDoublingHighMul`` of gemmlowp/fixedpoint/fixedpoint.h."""
    product = a * b
    nudge = (1 << 30) if product >= 0 else 1 - (1 << 30)
    total = product + nudge
    # C divides towards zero.
    return total // 2**31 if total >= 0 else -(-total // 2**31)


def divide_by_power(x: int, exponent: int) -> int:
    """``RoundingDivideByPOT`` of gemmlowp/fixedpoint/fixedpoint.h."""
    mask = (1 << exponent) - 1
    remainder = x & mask
    threshold = (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if remainder > threshold else 0)


def tflite_multiply(x: int, real: float) -> int:
    """``MultiplyByQuantizedMultiplier`` with double rounding."""
    multiplier, shift = tflite_multiplier(real)
    left = max(shift, 0)
    right = max(-shift, 0)
    return divide_by_power(doubling_high_multiply(x * (1 << left), multiplier), right)


def sample(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    real = torch.rand(400, generator=generator, dtype=torch.float64)
    exponents = torch.randint(-18, 3, (400,), generator=generator)
    real = real * 2.0**exponents
    real[:4] = torch.tensor([0.5, 0.25, 2.0**-31, 1 - 2.0**-40])
    accumulators = torch.randint(
        -(2**24),
        2**24,
        (400,),
        generator=generator,
    )
    accumulators[:6] = torch.tensor([0, 1, -1, 3, -3, -6])
    return accumulators, real


def test_multipliers(generator: torch.Generator) -> None:
    _, real = sample(generator)
    multiplier, shift = quantize_multiplier(real)
    assert list(zip(multiplier.tolist(), shift.tolist(), strict=True)) == [
        tflite_multiplier(value) for value in real.tolist()
    ]
    assert quantize_multiplier(torch.tensor(0.0, dtype=torch.float64))[0] == 0


def test_doubling_is_that_of_gemmlowp(generator: torch.Generator) -> None:
    accumulators, real = sample(generator)
    expected = [
        tflite_multiply(x, value)
        for x, value in zip(accumulators.tolist(), real.tolist(), strict=True)
    ]
    assert multiply(accumulators, real).tolist() == expected


class Between(nn.Module):
    """An addition between quantizers of both operands and of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TensorQuantizer(AFFINE)
        self.second = TensorQuantizer(QuantDescriptor())
        self.last = TensorQuantizer(AFFINE)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.last(self.first(a) + self.second(b))


def grid(quantizer: TensorQuantizer, x: Tensor) -> tuple[Tensor, float, int]:
    """Return centred codes, the scale and the zero point."""
    scale, zero_point = quantizer.calculate_qparams()
    whole = torch.tensor(codes(quantizer(x), quantizer)).view(x.shape)
    return whole - int(zero_point), float(scale), int(zero_point)


def clamped(code: int) -> int:
    return max(-128, min(127, code))


def test_additions_are_those_of_tensorflow_lite(generator: torch.Generator) -> None:
    a = torch.randn(5, 40, generator=generator)
    b = 3 * torch.randn(40, generator=generator)
    model = Between().eval()
    torchq.calibrate(model, [(a, b)], progress=False)
    first, s1, _ = grid(model.first, a)
    second, s2, _ = grid(model.second, b)
    s_out, z_out = (float(part) for part in model.last.calculate_qparams())
    widest = 2 * max(s1, s2)
    expected = []
    others = second.expand(5, 40).flatten().tolist()
    for one, other in zip(first.flatten().tolist(), others, strict=True):
        parts = (
            tflite_multiply(one << 20, s1 / widest),
            tflite_multiply(other << 20, s2 / widest),
        )
        expected.append(
            clamped(tflite_multiply(sum(parts), widest / 2**20 / s_out) + int(z_out))
        )
    result = runner(model, (a, b)).run(
        (a, b),
        backend=fixed_point(),
    )
    assert codes(result, model.last) == expected
    assert torch.allclose(
        result,
        model(a, b),
        atol=1.01 * s_out,
    )
