"""Passes that bring a trace into the few forms that other passes know."""

from __future__ import annotations

import operator

from torch import fx, nn

from torchq.graph import forward_hook_kind, trace_or_none
from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.graph.traced_module import AssertNone, BuildDict, nth_chunk

__all__ = [
    "build_dict_by_module",
    "check_none_by_module",
    "drop_identity",
    "select_chunk",
    "view_to_reshape",
]

_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def check_none_by_module(editor: GraphEditor, node: fx.Node) -> bool:
    """Let a module check that an argument is None: calls of modules survive pickling.

    This pass comes first, because nothing reads the check and others would erase it.

    Before::

        _assert_is_none(argument, message)

    After::

        AssertNone(argument)
    """
    source = match.input_node(node)
    if source is None or not match.is_none_check(node):
        return False
    editor.replace(node, "absent", AssertNone(str(node.args[1])), source)
    return True


def build_dict_by_module(editor: GraphEditor, node: fx.Node) -> bool:
    """Let a module build a dictionary of a special type: calls of modules survive pickling.

    Before::

        OrderedDict({"logits": x})

    After::

        BuildDict({"logits": x})
    """
    kind = node.target
    if node.op != "call_function" or not (isinstance(kind, type) and issubclass(kind, dict)):
        return False
    editor.replace(node, "made", BuildDict(kind), *node.args)
    return True


def drop_identity(editor: GraphEditor, node: fx.Node) -> bool:
    """Drop what does nothing in eval mode; it would only keep other nodes apart.

    Before::

        x -> Identity, Dropout or drop path -> reader

    After::

        x -> reader
    """
    source = match.input_node(node)
    does_nothing = (
        type(editor.module(node)) in _IDENTITIES
        or match.is_inactive_dropout(node)
        or (node.op == "call_module" and _returns_its_input(editor.modules[str(node.target)]))
    )
    if source is None or not does_nothing:
        return False
    editor.bypass(node, source)
    return True


def _returns_its_input(module: nn.Module) -> bool:
    """Return True for foreign code that does nothing in eval mode, as a drop path does."""
    if type(module).__module__.partition(".")[0] in ("torch", "torchq"):
        return False
    changed = forward_hook_kind(module) is not None or "forward" in vars(module)
    if changed or module.state_dict() or next(module.children(), None) is not None:
        return False
    found = trace_or_none(module, lambda part: False)
    if found is None:
        return False
    first, *_, last = found.graph.nodes
    value = last.args[0]
    while isinstance(value, fx.Node) and match.is_inactive_dropout(value):
        value = match.input_node(value)
    return value is first


def view_to_reshape(editor: GraphEditor, node: fx.Node) -> bool:
    """Replace ``view`` by ``reshape``: deployed results are channels last, which view may refuse.

    Before::

        x.view(sizes)

    After::

        x.reshape(sizes)
    """
    if node.op != "call_method" or node.target != "view" or match.views_bits(node):
        return False
    node.target = "reshape"
    return True


def select_chunk(editor: GraphEditor, node: fx.Node) -> bool:
    """Turn one item of a split tensor into a view of that tensor, through which codes can pass.

    Before::

        x.chunk(2, 1)[0]

    After::

        nth_chunk(x, "chunk", 0, 2, 1)
    """
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    chunks, index = node.args
    split = match.split_call(chunks)
    if split is None or not isinstance(chunks, fx.Node) or not isinstance(index, int):
        return False
    source, method, rest = split
    with editor.graph.inserting_before(node):
        arguments = (source, method, index, *rest)
        chunk = editor.graph.call_function(nth_chunk, arguments, dict(chunks.kwargs))
    editor.bypass(node, chunk)
    return True
