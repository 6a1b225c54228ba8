"""Removing what the exporter notes for its own debugging."""

from __future__ import annotations

from torchq.onnx.ir import Model

__all__ = ["remove_debug_metadata"]

_MODULE_NAMES = "name_scopes"


def remove_debug_metadata(model: Model) -> None:
    """Remove stack traces and comments, and keep the names of modules.

    ``onnx_ir`` has a pass that removes all metadata; it would also remove the names of modules,
    which tell the readers of a file where a node comes from.

    Before::

        Nodes carry stack traces, which hold paths of the machine and are most of a small file.

    After::

        The only metadata of a node is the list of the modules that it comes from.
    """
    model.graph.metadata_props.clear()
    for node in model.graph:
        for key in [key for key in node.metadata_props if not key.endswith(_MODULE_NAMES)]:
            del node.metadata_props[key]
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            value.doc_string = None
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        value.metadata_props.clear()
        value.doc_string = None
