"""Pass that lets an addition overwrite its residual."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.base import IntegerModule
from torchq.lowering.modules.conv import Int8Conv

__all__ = ["reuse_residual_buffer"]


def reuse_residual_buffer(editor: GraphEditor, node: fx.Node) -> bool:
    """Let an addition overwrite the buffer of its residual where nobody else can see that.

    The convolution must be the last reader, and nothing else may be a view of the residual: the
    node that makes it and its other readers all return tensors of their own.

    Before::

        residual -> last reader: Int8Conv(codes, residual) -> new tensor

    After::

        residual -> last reader: Int8Conv(codes, residual) -> the memory of residual
    """
    layer, residual = editor.module(node), match.input_node(node, 1)
    if not isinstance(layer, Int8Conv) or residual is None or residual is match.input_node(node):
        return False
    readers = [user for user in residual.users if user is not node]
    if layer.overwrites_residual or not _returns_new_tensor(editor, residual):
        return False
    if not all(_returns_new_tensor(editor, user) and user < node for user in readers):
        return False
    layer.overwrites_residual = True
    return True


def _returns_new_tensor(editor: GraphEditor, node: fx.Node) -> bool:
    return isinstance(editor.module(node), IntegerModule)
