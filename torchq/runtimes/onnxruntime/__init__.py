"""ONNX Runtime: all that torchq knows of it.

``runtime`` says where quantizers stand, ``engine`` runs files, ``rules`` checks these, ``pairs``,
``convolutions`` and ``matmuls`` are passes that files for it go through, ``arithmetic`` has the
formulas of its integer kernels, ``session`` opens files, and ``inspect`` tells what it makes of
one.
"""

from torchq.runtimes.onnxruntime.engine import SessionEngine
from torchq.runtimes.onnxruntime.inspect import (
    InspectReport,
    NodePlacement,
    inspect_onnx,
)
from torchq.runtimes.onnxruntime.runtime import OnnxRuntime
from torchq.runtimes.onnxruntime.session import Session

__all__ = [
    "InspectReport",
    "NodePlacement",
    "OnnxRuntime",
    "Session",
    "SessionEngine",
    "inspect_onnx",
]
