"""Each pass alone: what it does to the modules that it touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from tests.lowering.common import calibrated
from tests.lowering.pass_graphs import (
    CLAMPED,
    OTHER,
    POSITIVE,
    Q,
    after,
    apply,
    conv,
    dequantize,
    edit,
    norm,
    only,
    picture,
    quantize,
)
from torchq.graph import trace_or_none
from torchq.lowering import Int8Conv, QParams
from torchq.lowering.codes import CodesAvgPool2d, CodesMaxPool2d, Dequantize, Quantize
from torchq.lowering.kernel import ConvParams
from torchq.lowering.passes.editor import GraphEditor


def test_the_check_of_an_argument_survives() -> None:
    class Optional(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    found = trace_or_none(Optional(), lambda m: False)
    assert isinstance(found, fx.GraphModule)
    editor = GraphEditor(found, torch.float32)
    assert apply(editor, "check_none_by_module")
    editor.prune()
    editor.root.recompile()
    x = torch.ones(2)
    assert torch.equal(editor.root(x), x)
    with pytest.raises(AssertionError, match="mask has been specialized to have value None"):
        editor.root(x, x)


class DropPath(nn.Module):
    """Foreign code that drops samples while training, by its own operators or by a function."""

    def __init__(self, by_function: bool = False) -> None:
        super().__init__()
        self.by_function = by_function

    def forward(self, x: Tensor) -> Tensor:
        if self.by_function:
            return F.dropout(x, 0.5, self.training)
        return x * (torch.rand(len(x), 1) > 0.5) if self.training else x


class Half(nn.Module):
    """Foreign code that does something in eval mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x / 2


def test_foreign_code_that_does_nothing_is_dropped() -> None:
    modules = {"a": DropPath(), "b": DropPath(by_function=True), "c": Half()}
    modules["a"].register_buffer("state", torch.ones(1))
    editor = edit(modules, lambda m, x, y: m.c(m.b(m.a(x))))
    assert apply(editor, "drop_identity")
    assert picture(editor.root) == "Half(DropPath(x))"
    del modules["a"].state
    editor = edit(modules, lambda m, x, y: m.c(m.b(m.a(x))))
    assert apply(editor, "drop_identity")
    assert picture(editor.root) == "Half(x)"


@pytest.mark.parametrize("with_neighbour", [False, True])
def test_a_clamp_becomes_bounds_of_codes(with_neighbour: bool) -> None:
    """Codes that are concatenated with others keep their zero point."""

    def forward(m: Any, x: Tensor, y: Tensor) -> Tensor:
        codes = m.a(F.relu6(x))
        return torch.cat([codes, y], 1) if with_neighbour else codes

    quantizer = only(after({"a": quantize()}, forward, "absorb_clamp"), Quantize)
    assert quantizer.qparams == (QParams(0.5, 128, 128, 140) if with_neighbour else CLAMPED)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (lambda m, x, y: torch.mean(F.relu(x), 1), POSITIVE),
        (lambda m, x, y: m.layer(x), POSITIVE),
        (lambda m, x, y: m.values(x) + F.relu(y), POSITIVE),
        (lambda m, x, y: F.relu(x) - 1, None),
        (lambda m, x, y: F.relu(x) * -1, None),
    ],
)
def test_codes_of_values_that_are_never_negative_start_at_zero(
    source: Callable[..., Any], expected: QParams | None
) -> None:
    modules = {"layer": conv(activation="relu"), "values": dequantize(POSITIVE), "a": quantize()}
    editor = edit(modules, lambda m, x, y: m.a(source(m, x, y)))
    assert apply(editor, "use_unsigned_codes") == (expected is not None)
    assert only(editor, Quantize).qparams == (expected or Q)


@pytest.mark.parametrize(
    ("name", "forward", "modules"),
    [
        # The sum with the residual would be scaled too.
        ("fold_batchnorm", lambda m, x, y: m.b(m.a(x, y)), {"a": conv(), "b": norm()}),
        # It computes statistics of each batch.
        (
            "fold_batchnorm",
            lambda m, x, y: m.b(m.a(x)),
            {"a": conv(), "b": nn.BatchNorm2d(2, track_running_stats=False)},
        ),
        # No kernel of a convolution computes it.
        ("fuse_activation", lambda m, x, y: m.b(m.a(x)), {"a": conv(), "b": nn.GELU()}),
        # A kernel adds one residual.
        ("fuse_add", lambda m, x, y: x + m.a(x, y), {"a": conv()}),
        # Another node reads the values.
        ("hoist_quantize", lambda m, x, y: (m.a(z := x.flatten(1)), z), {"a": quantize()}),
        # One of the tensors is no codes.
        ("sink_dequantize", lambda m, x, y: torch.cat([m.a(x), y]), {"a": dequantize()}),
        # The result is codes already.
        (
            "fuse_requantize",
            lambda m, x, y: m.b(m.a(x)),
            {"a": conv(output_qparams=Q), "b": quantize()},
        ),
    ],
)
def test_a_pass_leaves_alone_what_it_would_break(
    name: str, forward: Callable[..., Any], modules: dict[str, nn.Module]
) -> None:
    editor = edit(modules, forward)
    before = picture(editor.root)
    assert not apply(editor, name)
    assert picture(editor.root) == before


def test_batchnorm_is_folded_into_scales_and_bias() -> None:
    layer, x = conv(), torch.randn(1, 2, 3, 3)
    expected = norm().eval()(layer(x))
    folded = only(
        after({"a": layer, "b": norm()}, lambda m, x, y: m.b(m.a(x)), "fold_batchnorm"), Int8Conv
    )
    assert torch.equal(folded.weight_codes, layer.weight_codes)
    # Values of the order 100 are rounded once more by a BatchNorm of its own.
    torch.testing.assert_close(folded(x), expected, rtol=1e-5, atol=1e-4)


def test_a_layer_that_another_node_calls_is_not_changed() -> None:
    """The second call of a layer keeps the layer without the epilogue."""
    shared = conv()
    editor = edit({"a": shared}, lambda m, x, y: (F.relu(m.a(x)), m.a(y)))
    assert apply(editor, "fuse_activation")
    layers = [editor.modules[str(n.target)] for n in editor.graph.nodes if n.op == "call_module"]
    assert sorted(layer.activation for layer in layers) == ["none", "relu"]  # type: ignore[type-var]
    assert shared.activation == "none" and layers[0] is not layers[1]


def test_the_epilogue_of_a_layer_holds_what_followed_it() -> None:
    modules = {"a": conv(), "b": nn.ReLU6(), "c": quantize()}
    layer = only(
        after(modules, lambda m, x, y: m.c(m.b(m.a(x))), "absorb_clamp", "fuse_requantize"),
        Int8Conv,
    )
    assert layer.output_qparams == CLAMPED
    assert (layer.activation, layer.arguments) == ("clamp", [0.0, 6.0])
    modules = {"a": conv(), "b": dequantize(OTHER), "c": quantize()}
    layer = only(after(modules, lambda m, x, y: m.c(m.a(x, m.b(y))), "fuse_requantize"), Int8Conv)
    assert (layer.output_qparams, layer.residual_qparams) == (Q, OTHER)


def test_a_moved_zero_point_reaches_every_reader() -> None:
    modules: dict[str, nn.Module] = {
        "start": quantize(POSITIVE),
        "pool": CodesMaxPool2d(2),
        "layer": conv(output_qparams=Q),
        "average": CodesAvgPool2d(nn.AvgPool2d(2), Q, OTHER),
        "end": dequantize(),
    }

    def forward(m: Any, x: Tensor, y: Tensor) -> Any:
        codes = m.pool(m.start(x).transpose(2, 3))
        return (
            m.layer(codes, codes),
            m.end(torch.cat([codes, codes], 1)),
            m.average(codes),
        )

    editor = after(modules, forward, "propagate_qparams")
    layer = only(editor, Int8Conv)
    assert layer.input_qparams == layer.residual_qparams == POSITIVE
    assert only(editor, Dequantize).qparams == POSITIVE
    assert only(editor, CodesAvgPool2d).input_qparams == POSITIVE
    known = {node.name: qparams for node, qparams in editor.qparams.items()}
    assert known == {
        **dict.fromkeys(["start", "transpose", "pool", "cat"], POSITIVE),
        "average": OTHER,
        "layer": Q,
    }


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x, y: m.a(m.c(x)), True),
        (lambda m, x, y: m.a(m.d(x)), True),
        (lambda m, x, y: m.a(m.c(x) * torch.nn.functional.adaptive_avg_pool2d(m.d(y), 1)), True),
        (lambda m, x, y: m.a(m.c(x) + y), False),  # the caller's may be NaN
        (lambda m, x, y: m.a(m.c(x, y)), False),
        (lambda m, x, y: m.a(m.c(x) / m.d(y)), False),  # 0 / 0 is NaN
        (lambda m, x, y: m.a(x), False),
    ],
)
def test_nobody_looks_for_nan_in_values_made_from_codes(
    forward: Callable[..., Any], expected: bool
) -> None:
    editor = edit({"a": quantize(), "c": conv(), "d": dequantize()}, forward)
    assert apply(editor, "trust_finite_values") is expected
    assert only(editor, Quantize).finite is expected


def test_of_two_convolutions_the_pointwise_one_adds() -> None:
    strided = conv(params=ConvParams((2, 2), (0, 0), (1, 1)))
    for forward in (lambda m, x, y: m.a(x) + m.b(y), lambda m, x, y: m.b(y) + m.a(x)):
        editor = edit({"a": conv(), "b": strided}, forward)
        assert apply(editor, "fuse_add")
        (node,) = [n for n in editor.graph.nodes if n.op == "call_module" and len(n.args) == 2]
        layer = editor.layer(node)
        assert isinstance(layer, Int8Conv) and layer.is_pointwise


def stochastic_depth(input: Tensor, p: float, mode: str, training: bool = True) -> Tensor:
    return input * torch.bernoulli(torch.tensor(1 - p)) if training else input


fx.wrap("stochastic_depth")


class Dropping(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
        self.active = training

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.active)
        return self.last(
            stochastic_depth(F.dropout2d(x, training=self.active), 0.5, "row", self.active)
        )


@pytest.mark.parametrize("training", [False, True])
def test_functions_that_drop_nothing_do_not_part_layers(training: bool) -> None:
    int8 = torchq.deploy(calibrated(Dropping(training), torch.randn(2, 3, 9, 9)))
    assert isinstance(int8, fx.GraphModule)
    assert (int8.get_submodule("first").output_qparams is None) == training
    assert sum("drop" in str(node.target) for node in int8.graph.nodes) == 2 * training
