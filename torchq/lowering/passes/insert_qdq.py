"""Making every quantization in a traced model a node of its own."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx, nn

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import Editor, base_name
from torchq.lowering.graph.traced_module import Absent, Made
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.float_pointwise_conv import FloatPointwiseConv, is_pixel
from torchq.lowering.modules.qdq import Dequantize, GatedSiLU, Quantize
from torchq.lowering.passes.fold_batchnorm import static_qparams
from torchq.lowering.registry import active
from torchq.nn import (
    InputQuantized,
    QuantAdd,
    QuantCat,
    QuantMatMul,
    QuantModule,
    QuantMul,
    QuantSiLU,
    TensorQuantizer,
    revert_,
)
from torchq.utils import set_submodule

__all__ = ["Separator"]

_NOTHING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_OPENED = {QuantAdd: operator.add, QuantMul: operator.mul, QuantMatMul: torch.matmul}


class Separator(Editor):
    """The first scale of a rewrite."""

    def separate(self) -> None:
        """Put Quantize and Dequantize nodes where tensors are quantized, and drop what does nothing."""
        for node in list(self.graph.nodes):
            self._skip(node)
            self._take(node)
            self._make(node)
        for node in list(self.graph.nodes):
            self._separate(node)

    def _skip(self, node: fx.Node) -> None:
        """What does nothing outside training only keeps others apart."""
        if (
            node.op == "call_method"
            and node.target == "view"
            and not any(isinstance(a, torch.dtype) for a in node.args)
        ):
            node.target = "reshape"  # results are channels last, which view may refuse
        source = match.source_of(node)
        if (
            type(self.module(node)) in _NOTHING or match.drops_nothing(node)
        ) and source is not None:
            node.replace_all_uses_with(source)
            self.graph.erase_node(node)

    def _take(self, node: fx.Node) -> None:
        """One part of a split tensor becomes a rearrangement of that tensor, as slices are: codes go through it."""
        parts, index = (*node.args, None, None)[:2]
        if (
            node.target is not operator.getitem
            or not isinstance(index, int)
            or (found := match.split(parts)) is None
        ):
            return
        tensor, method, rest = found
        with self.graph.inserting_before(node):
            new = self.graph.call_function(
                match.part, (tensor, method, index, *rest), dict(parts.kwargs)
            )  # type: ignore[union-attr]
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _make(self, node: fx.Node) -> None:
        """What tracing once more, as unpickling does, would lose becomes a module."""
        if node.op != "call_function":
            return
        if isinstance(node.target, type) and issubclass(node.target, dict):
            self.replace(node, Made(node.target), "made", *node.args)  # type: ignore[arg-type]
        elif match.is_check(node):
            self.replace(node, Absent(str(node.args[1])), "absent", node.all_input_nodes[0])

    def measure_codes(self) -> None:
        """Codes have the shape of the values made from them, which often nothing else reads."""
        for node in self.graph.nodes:
            source = match.source_of(node)
            if (
                match.measures(node)
                and source is not None
                and isinstance(self.module(source), Dequantize)
            ):
                node.replace_input_with(source, source.all_input_nodes[0])

    def _separate(self, node: fx.Node) -> None:
        """Quantizing becomes a node of its own: before integer layers, in place of quantizers and of layers that quantize their input."""
        module = self.module(node)
        source = node.args[0] if node.args else None
        if isinstance(module, QuantCat) and set(node.kwargs) <= {"dim"}:
            self._open(node, module)
        if not isinstance(source, fx.Node) or node.kwargs:
            return
        if (
            isinstance(module, Int8Conv)
            and FloatPointwiseConv.fits(module)
            and is_pixel(source, self.modules)
        ):
            self.modules[str(node.target)] = pixel = FloatPointwiseConv(module)
            set_submodule(self.root, str(node.target), pixel)
        elif isinstance(module, Int8Layer) and module.pre_quant_scale is None:
            with self.graph.inserting_before(node):
                node.replace_input_with(
                    source,
                    self.call(f"{node.target}_input", Quantize(module.input_qparams), source),
                )
        elif isinstance(module, TensorQuantizer) and (qparams := static_qparams(module)):
            codes = self.before(node, Quantize(qparams), source)
            self.replace(node, Dequantize(qparams, self.dtype), "values", codes)
        elif isinstance(module, (QuantAdd, QuantMul, QuantMatMul)):
            self._open(node, module)
        elif (
            isinstance(module, InputQuantized)
            and len(node.args) == 1
            and (qparams := static_qparams(module.input_quantizer))
        ):
            codes = self.before(node, Quantize(qparams), source)
            with self.graph.inserting_before(node):
                values = self.call(f"{node.target}_values", Dequantize(qparams, self.dtype), codes)
            self.replace(node, _without_input_quantizer(module), "float", values)

    def _open(self, node: fx.Node, module: QuantAdd | QuantMul | QuantMatMul | QuantCat) -> None:
        """Sums and concatenations with quantized operands become plain ones of quantized values."""
        if isinstance(module, QuantCat):
            tensors = node.args[0]
            if not isinstance(tensors, (list, tuple)) or not isinstance(
                module.input_quantizer, TensorQuantizer
            ):
                return
            operands: list[object] = list(tensors)
            quantizers: list[nn.Module] = [module.input_quantizer] * len(tensors)
        else:
            operands, quantizers = list(node.args), [module.input_quantizer, module.other_quantizer]
        if not all(
            isinstance(o, fx.Node) and (active(q) is None or static_qparams(q))
            for o, q in zip(operands, quantizers, strict=True)
        ):
            return
        values = [
            self._values(node, o, q)
            for o, q in zip(operands, quantizers, strict=True)
            if isinstance(o, fx.Node)
        ]
        with self.graph.inserting_before(node):
            if isinstance(module, QuantCat):
                dim = (*node.args[1:], node.kwargs.get("dim"))[0]
                new = self.graph.call_function(
                    torch.cat, (values, module.dim if dim is None else dim)
                )
            else:
                new = self.graph.call_function(_OPENED[type(module)], tuple(values))
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _values(self, node: fx.Node, operand: fx.Node, quantizer: nn.Module) -> fx.Node:
        qparams = static_qparams(quantizer)
        if qparams is None:
            return operand
        codes = self.before(node, Quantize(qparams), operand)
        with self.graph.inserting_before(node):
            return self.call(f"{base_name(node)}_values", Dequantize(qparams, self.dtype), codes)


def _without_input_quantizer(module: QuantModule) -> nn.Module:
    if isinstance(module, QuantSiLU) and (
        gate := static_qparams(module.get_submodule("gate_quantizer"))
    ):
        return GatedSiLU(gate)
    plain = revert_(copy.deepcopy(module))
    vars(plain).pop("deploy_note", None)
    return plain
