"""Passes over ONNX graphs, in the order in which an export runs them.

A pass is a function that changes a model in place; its docstring states the graph before and after.
"""

from torchq.onnx.ir import Pass
from torchq.onnx.passes.constants import (
    drop_neutral,
    fold_shapes,
    fold_slices,
    lift_constants,
)
from torchq.onnx.passes.convolutions import fold_pads
from torchq.onnx.passes.matmuls import keep_integer_matmuls, store_transposed
from torchq.onnx.passes.pairs import (
    fold_weights,
    merge_duplicates,
    remove_debug_metadata,
)

__all__ = ["EXPORT_PASSES"]

#: What every exported graph goes through, before the passes of a target.
EXPORT_PASSES: tuple[Pass, ...] = (
    lift_constants,
    fold_slices,
    drop_neutral,
    fold_weights,
    merge_duplicates,
    fold_shapes,
    fold_pads,
    store_transposed,
    keep_integer_matmuls,
    remove_debug_metadata,
)
