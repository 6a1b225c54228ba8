"""Each pass alone on a small graph: what stands there before and after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchq
from tests.lowering.pass_graphs import (
    OTHER,
    apply,
    calibrated,
    conv,
    dequantize,
    edit,
    linear,
    norm,
    picture,
    quantize,
    quantizer,
)


@dataclass
class Case:
    """A pass on a graph: ``after`` is the picture it leaves, None where nothing may change."""

    name: str
    forward: Callable[..., Any]
    before: str
    after: str | None
    modules: dict[str, nn.Module] = field(default_factory=dict)


CASES = [
    # --- normalize
    Case(
        "build_dict_by_module",
        lambda m, x, y: OrderedDict(a=x),
        "OrderedDict({a: x})",
        "BuildDict({a: x})",
    ),
    Case(
        "drop_identity",
        lambda m, x, y: m.a(x) + y,
        "add(Dropout(x), y)",
        "add(x, y)",
        {"a": nn.Dropout()},
    ),
    Case(
        "drop_identity",
        lambda m, x, y: F.dropout(x, 0.5, True),
        "dropout(x, p=0.5, training=True, inplace=False)",
        None,
    ),
    Case("view_to_reshape", lambda m, x, y: x.view(2, -1), "view(x, 2, -1)", "reshape(x, 2, -1)"),
    Case("view_to_reshape", lambda m, x, y: x.view(torch.int32), "view(x, torch.int32)", None),
    Case(
        "select_chunk",
        lambda m, x, y: x.chunk(2, dim=1)[1],
        "getitem(chunk(x, 2, dim=1), 1)",
        "nth_chunk(x, 'chunk', 1, 2, dim=1)",
    ),
    # --- insert_qdq
    Case(
        "open_quantized_operator",
        lambda m, x, y: m.a(x, y),
        "QuantAdd(x, y)",
        "add(Dequantize(Quantize(x)), Dequantize(Quantize(y)))",
        {"a": calibrated(torchq.nn.Add())},
    ),
    Case(
        "open_quantized_concat",
        lambda m, x, y: m.a([x, y], dim=1),
        "QuantCat([x, y], dim=1)",
        "cat([Dequantize(Quantize(x)), Dequantize(Quantize(y))], 1)",
        {"a": calibrated(torchq.nn.Cat())},
    ),
    Case(
        "replace_quantizer",
        lambda m, x, y: m.a(x),
        f"{torchq.TensorQuantizer.__name__}(x)",
        "Dequantize(Quantize(x))",
        {"a": quantizer()},
    ),
    Case(
        "replace_quantizer",
        lambda m, x, y: m.a(x),
        f"{torchq.TensorQuantizer.__name__}(x)",
        None,
        {"a": torchq.TensorQuantizer(torchq.QuantDescriptor(dynamic=True))},
    ),
    Case(
        "expose_input_quantizer",
        lambda m, x, y: m.a(x),
        "QuantAvgPool2d(x)",
        "AvgPool2d(Dequantize(Quantize(x)))",
        {"a": calibrated(nn.AvgPool2d(2))},
    ),
    Case(
        "quantize_layer_input",
        lambda m, x, y: m.a(x),
        "Int8Conv(x)",
        "Int8Conv(Quantize(x))",
        {"a": conv()},
    ),
    Case(
        "quantize_layer_input",
        lambda m, x, y: m.a(x),
        "Int8Conv(x)",
        None,
        {"a": conv(pre_quant_scale=torch.ones(2, 1, 1))},
    ),
    # --- cancel_qdq
    Case(
        "cancel_qdq",
        lambda m, x, y: m.b(m.a(x)),
        "Quantize(Dequantize(x))",
        "x",
        {"a": dequantize(), "b": quantize()},
    ),
    # --- hoist_quantize
    Case(
        "absorb_clamp",
        lambda m, x, y: m.a(F.relu6(x)),
        "Quantize(relu6(x, inplace=False))",
        "Quantize(x)",
        {"a": quantize()},
    ),
    Case(
        "absorb_clamp",
        lambda m, x, y: [m.a(z := F.relu(x)), z],
        "[Quantize(relu(x, inplace=False)), relu(x, inplace=False)]",
        None,
        {"a": quantize()},
    ),
    Case(
        "hoist_quantize",
        lambda m, x, y: m.a(torch.cat([x, y], 1)),
        "Quantize(cat([x, y], 1))",
        "cat([Quantize(x), Quantize(y)], 1)",
        {"a": quantize()},
    ),
    Case(
        "hoist_quantize",
        lambda m, x, y: m.a(F.max_pool2d(x, 2)),
        "Quantize(max_pool2d(x, 2, stride=None, padding=0, dilation=1, ceil_mode=False, "
        "return_indices=False))",
        "CodesMaxPool2d(Quantize(x))",
        {"a": quantize()},
    ),
    Case(
        "hoist_quantize",
        lambda m, x, y: m.a(x.flatten(1)),
        "Quantize(flatten(x, 1))",
        "flatten(Quantize(x), 1)",
        {"a": quantize()},
    ),
    # --- sink_dequantize
    Case(
        "sink_dequantize",
        lambda m, x, y: torch.cat([m.a(x), m.b(y)], 1),
        "cat([Dequantize(x), Dequantize(y)], 1)",
        "Dequantize(cat([x, y], 1))",
        {"a": dequantize(), "b": dequantize()},
    ),
    Case(
        "sink_dequantize",
        lambda m, x, y: m.b(m.a(x)),
        "MaxPool2d(Dequantize(x))",
        "Dequantize(CodesMaxPool2d(x))",
        {"a": dequantize(), "b": nn.MaxPool2d(2)},
    ),
    # --- fold_batchnorm
    Case(
        "fold_batchnorm",
        lambda m, x, y: m.b(m.a(x)),
        "BatchNorm2d(Int8Conv(x))",
        "Int8Conv(x)",
        {"a": conv(), "b": norm()},
    ),
    Case(
        "fold_batchnorm",
        lambda m, x, y: [m.b(z := m.a(x)), z],
        "[BatchNorm2d(Int8Conv(x)), Int8Conv(x)]",
        None,
        {"a": conv(), "b": norm()},
    ),
    # --- fuse_epilogue
    Case(
        "fuse_activation",
        lambda m, x, y: m.b(m.a(x)),
        "SiLU(Int8Linear(x))",
        "Int8Linear(x)",
        {"a": linear(), "b": nn.SiLU()},
    ),
    Case(
        "fuse_activation",
        lambda m, x, y: m.c(m.b(m.a(x))),
        "Quantize(ReLU(Int8Conv(x)))",
        None,
        {"a": conv(), "b": nn.ReLU(), "c": quantize()},
    ),
    Case(
        "fuse_add",
        lambda m, x, y: y + m.a(x),
        "add(y, Int8Conv(x))",
        "Int8Conv(x, y)",
        {"a": conv()},
    ),
    Case("fuse_add", lambda m, x, y: y + m.a(x), "add(y, Int8Linear(x))", None, {"a": linear()}),
    Case(
        "fuse_requantize",
        lambda m, x, y: m.b(m.a(x)),
        "Quantize(Int8Conv(x))",
        "Int8Conv(x)",
        {"a": conv(), "b": quantize()},
    ),
    Case(
        "fuse_requantize",
        lambda m, x, y: m.c(m.a(x, m.b(y))),
        "Quantize(Int8Conv(x, Dequantize(y)))",
        "Int8Conv(x, y)",
        {"a": conv(), "b": dequantize(), "c": quantize()},
    ),
    # --- int_pooling
    Case(
        "average_codes",
        lambda m, x, y: m.c(m.b(m.a(x))),
        "Quantize(AvgPool2d(Dequantize(x)))",
        "CodesAvgPool2d(x)",
        {"a": dequantize(), "b": nn.AvgPool2d(2), "c": quantize(OTHER)},
    ),
    # --- propagate_qparams
    Case(
        "read_shape_of_codes",
        lambda m, x, y: m.a(x).size(0),
        "size(Dequantize(x), 0)",
        "size(x, 0)",
        {"a": dequantize()},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}: {case.before}")
def test_a_pass_changes_its_pattern_and_nothing_else(case: Case) -> None:
    editor = edit(case.modules, case.forward)
    assert picture(editor.root) == case.before
    assert apply(editor, case.name) == (case.after is not None)
    assert picture(editor.root) == (case.after or case.before)
    assert not apply(editor, case.name)
