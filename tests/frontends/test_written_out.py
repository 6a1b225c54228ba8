"""Activations that files write out in arithmetic become one module, where nothing reads a part."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.frontends.onnx_writer import Writer, assert_agrees

ROOT = math.sqrt(2.0)


def number(w: Writer, value: float, *shape: int) -> Any:
    """Store a number, without dimensions or with some of size 1."""
    return w.weight(torch.full(shape, value))


def one_plus_erf(w: Writer, x: Any, *shape: int) -> Any:
    """Write the factor that a GELU multiplies its input by, doubled."""
    erf = w.node("Erf", w.node("Div", x, number(w, ROOT, *shape)))
    return w.node("Add", erf, number(w, 1.0, *shape))


def torch_order(w: Writer, x: Any) -> Any:
    return w.node("Mul", w.node("Mul", x, one_plus_erf(w, x)), number(w, 0.5))


def half_first(w: Writer, x: Any) -> Any:
    return w.node("Mul", w.node("Mul", x, number(w, 0.5)), one_plus_erf(w, x))


def half_inside(w: Writer, x: Any) -> Any:
    half = w.node("Mul", one_plus_erf(w, x, 1, 1), number(w, 0.5, 1))
    return w.node("Mul", half, x)


def by_products(w: Writer, x: Any) -> Any:
    erf = w.node("Erf", w.node("Mul", number(w, 1 / ROOT), x))
    total = w.node("Add", number(w, 1.0), erf)
    return w.node("Div", w.node("Mul", total, x), number(w, 2.0))


def tanh_of_cube(w: Writer, x: Any) -> Any:
    cube = w.node("Pow", x, number(w, 3.0))
    inner = w.node("Add", x, w.node("Mul", cube, number(w, 0.044715)))
    factor = number(w, math.sqrt(2 / math.pi))
    total = w.node("Add", w.node("Tanh", w.node("Mul", inner, factor)), number(w, 1.0))
    return w.node("Mul", w.node("Mul", number(w, 0.5), x), total)


def tanh_of_squares(w: Writer, x: Any) -> Any:
    square = w.node("Mul", w.node("Mul", x, number(w, 0.044715)), x)
    left = w.node("Mul", x, number(w, math.sqrt(2 / math.pi)))
    inner = w.node("Mul", left, w.node("Add", number(w, 1.0), square))
    total = w.node("Add", w.node("Tanh", inner), number(w, 1.0))
    return w.node("Mul", w.node("Mul", x, total), number(w, 0.5))


def behind_sum(w: Writer, x: Any) -> Any:
    return torch_order(w, w.node("Add", x, w.node("Relu", x)))


def half_precision(w: Writer, x: Any) -> Any:
    root = float(torch.tensor(ROOT).half())
    erf = w.node("Erf", w.node("Div", x, number(w, root)))
    product = w.node("Mul", x, w.node("Add", erf, number(w, 1.0)))
    return w.node("Mul", product, number(w, 0.5))


FORMS: list[Callable[[Writer, Any], Any]] = [
    torch_order,
    half_first,
    half_inside,
    by_products,
    tanh_of_cube,
    tanh_of_squares,
    behind_sum,
    half_precision,
]


def gelus(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.GELU)]


@pytest.mark.parametrize("is_output", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_gelu_in_any_order_is_one_module(
    form: Callable[[Writer, Any], Any], is_output: bool
) -> None:
    w = Writer(17)
    x = w.input("x", ["batch", 6])
    y = form(w, w.node("Gemm", x, w.random(6, 8)))
    last = y if is_output else w.node("Gemm", y, w.random(8, 4))
    read = assert_agrees(w.model(last), {"x": torch.randn(5, 6)})
    assert len(gelus(read)) == 1
    functions = [node.target for node in read.graph.nodes]
    assert not {torch.erf, torch.mul, torch.div, torch.pow} & {*functions}
    assert functions.count(torch.add) == (form is behind_sum)


def other_number(w: Writer, x: Any) -> Any:
    erf = w.node("Erf", w.node("Div", x, number(w, 1.5)))
    return w.node(
        "Mul", w.node("Mul", x, w.node("Add", erf, number(w, 1.0))), number(w, 0.5)
    )


def near_number(w: Writer, x: Any) -> Any:
    erf = w.node("Erf", w.node("Div", x, number(w, 1.41)))
    product = w.node("Mul", x, w.node("Add", erf, number(w, 1.0)))
    return w.node("Mul", product, number(w, 0.5))


def tanh_of_itself(w: Writer, x: Any) -> Any:
    total = w.node("Add", w.node("Tanh", x), number(w, 1.0))
    return w.node("Mul", w.node("Mul", x, total), number(w, 0.5))


def other_factor(w: Writer, x: Any) -> Any:
    product = w.node("Mul", w.node("Relu", x), one_plus_erf(w, x))
    return w.node("Mul", product, number(w, 0.5))


def without_half(w: Writer, x: Any) -> Any:
    return w.node("Relu", w.node("Mul", x, one_plus_erf(w, x)))


def read_inside(w: Writer, x: Any) -> Any:
    total = one_plus_erf(w, x)
    gelu = w.node("Mul", w.node("Mul", x, total), number(w, 0.5))
    return w.node("Add", gelu, total)


def squared(w: Writer, x: Any) -> Any:
    total = one_plus_erf(w, x)
    return w.node("Mul", w.node("Mul", total, total), number(w, 0.5))


@pytest.mark.parametrize(
    "form",
    [
        other_number,
        near_number,
        tanh_of_itself,
        other_factor,
        without_half,
        read_inside,
        squared,
    ],
    ids=lambda form: form.__name__,
)
def test_what_is_no_gelu_stays_as_it_is(form: Callable[[Writer, Any], Any]) -> None:
    w = Writer(17)
    y = form(w, w.node("Gemm", w.input("x", ["batch", 6]), w.random(6, 8)))
    read = assert_agrees(w.model(y), {"x": torch.randn(5, 6)})
    assert gelus(read) == []


def test_no_quantizer_stands_inside() -> None:
    w = Writer(17)
    y = torch_order(w, w.node("Gemm", w.input("x", ["batch", 6]), w.random(6, 8)))
    model = torchq.from_onnx(w.model(w.node("Gemm", y, w.random(8, 4))))
    x = torch.randn(5, 6)
    plan = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert [d.class_name for d in plan.replaced] == ["Linear", "Linear"]
