"""Small traced models for the tests of single passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

import torchq
from torchq.graph import trace_or_none
from torchq.lowering import Int8Conv, Int8Linear, QParams, passes
from torchq.lowering.codes import Dequantize, Quantize
from torchq.lowering.passes.editor import GraphEditor

Q = QParams(0.5, 128, 0, 255)
OTHER = QParams(0.25, 128, 0, 255)
POSITIVE = QParams(0.5, 0, 0, 127)
CLAMPED = QParams(0.5, 0, 0, 12)


def quantize(qparams: QParams = Q) -> Quantize:
    return Quantize(qparams)


def dequantize(qparams: QParams = Q) -> Dequantize:
    return Dequantize(qparams, torch.float32)


def conv(**attributes: Any) -> Int8Conv:
    """An integer 1 x 1 convolution of two channels."""
    weight = torch.tensor([[[[10]], [[-20]]], [[[30]], [[40]]]], dtype=torch.int8)
    arguments = (weight, torch.tensor([0.1, 0.2]), torch.tensor([1.0, 2.0]), Q)
    layer = Int8Conv(nn.Conv2d(2, 2, 1), *arguments, torch.float32, None)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def linear() -> Int8Linear:
    weight = torch.tensor([[10, -20], [30, 40]], dtype=torch.int8)
    return Int8Linear(weight, torch.tensor([0.1, 0.2]), None, Q, torch.float32, None)


def norm() -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(2)
    layer.running_mean, layer.running_var = torch.tensor([0.5, -1.0]), torch.tensor([4.0, 0.25])
    return layer


def calibrated(module: nn.Module, *inputs: Any) -> nn.Module:
    """``module``, whose inputs are quantized to ``QParams(0.5, 128, 0, 255)``."""
    rule = torchq.Rule("*", input=torchq.QuantDescriptor())
    torchq.quantize_(root := nn.Sequential(module).eval(), torchq.QuantConfig((rule,)))
    for part in root.modules():
        if isinstance(part, torchq.TensorQuantizer):
            part.set_amax(63.5)
    return root[0]


def quantizer() -> torchq.TensorQuantizer:
    """A quantizer to ``QParams(0.5, 128, 0, 255)``."""
    found = torchq.TensorQuantizer()
    found.set_amax(63.5)
    return found


class Model(nn.Module):
    """A forward over named modules."""

    def __init__(self, forward: Callable[..., Any], modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self._function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self._function(self, x, y)


def picture(graph_module: fx.GraphModule) -> str:
    """What the graph returns, as nested calls of classes and functions."""
    modules = dict(graph_module.named_modules(remove_duplicate=False))

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
            name = type(modules[str(value.target)]).__name__
        named = [f"{key}={text(v)}" for key, v in value.kwargs.items()]
        return f"{name}({', '.join([*map(text, value.args), *named])})"

    *_, output = graph_module.graph.nodes
    return text(output)


ALL = {rewrite.__name__: rewrite for rewrite in (*passes.INSERT_QDQ, *passes.FUSE, *passes.FINISH)}


def edit(case_modules: dict[str, nn.Module], forward: Callable[..., Any]) -> GraphEditor:
    found = trace_or_none(Model(forward, case_modules).eval(), lambda m: not isinstance(m, Model))
    assert isinstance(found, fx.GraphModule)
    return GraphEditor(found, torch.float32)


def apply(editor: GraphEditor, name: str) -> bool:
    changed = passes.apply_pass(editor, ALL[name])
    editor.graph.lint()
    editor.root.recompile()
    return changed


def after(modules: dict[str, nn.Module], forward: Callable[..., Any], *names: str) -> GraphEditor:
    editor = edit(modules, forward)
    for name in names:
        assert apply(editor, name)
    return editor


def only(editor: GraphEditor, kind: type) -> Any:
    used = [editor.modules[str(n.target)] for n in editor.graph.nodes if n.op == "call_module"]
    (found,) = (module for module in used if isinstance(module, kind))
    return found
