"""Pass that lets layers of the same shapes share a kernel."""

from __future__ import annotations

from torch import fx, nn

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.qdq import Quantize

__all__ = ["reuse_adding_kernel"]


def reuse_adding_kernel(editor: GraphEditor, node: fx.Node) -> bool:
    """Let a convolution that adds floats apply a ReLU that its readers would apply anyway.

    Most additions of a residual network apply one for the next addition. oneDNN compiles and keeps
    a kernel for each set of post-ops, hundreds of kilobytes each.

    Before::

        codes, residual -> Int8Conv -> Quantize without codes of negative numbers

    After::

        codes, residual -> Int8Conv(activation="relu") -> Quantize
    """
    layer, residual = editor.layer(node), match.input_node(node, 1)
    if not isinstance(layer, Int8Conv) or residual is None:
        return False
    if layer.activation != "none" or layer.output_qparams is not None:
        return False
    if not all(_cuts_negative(editor.module(user)) for user in node.users):
        return False
    editor.own_layer(node).activation = "relu"
    return True


def _cuts_negative(reader: nn.Module | None) -> bool:
    """Return True for a Quantize without codes of negative numbers, that looks for no NaN."""
    return isinstance(reader, Quantize) and reader.finite and reader.qparams.bounds[0] >= 0.0
