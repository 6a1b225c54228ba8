"""Runtimes, one object each: what a model is quantized, exported and deployed for.

A new one is a file with a :class:`Runtime`, and its name below.
"""

from torchq.runtime import RUNTIMES, Codes, FileRules, Placement, Runtime
from torchq.runtimes.api import deploy
from torchq.runtimes.beside_float import Speed, speed
from torchq.runtimes.chips import CHIPS
from torchq.runtimes.engine import Engine
from torchq.runtimes.executorch.runtime import ExecuTorch
from torchq.runtimes.fastest import Candidate, FastestReport
from torchq.runtimes.file_engine import EngineModule, FileEngine
from torchq.runtimes.onnx_engine import OnnxEngine
from torchq.runtimes.onnxruntime import (
    InspectReport,
    NodePlacement,
    OnnxRuntime,
    inspect_onnx,
)
from torchq.runtimes.openvino import OpenVino
from torchq.runtimes.pays import Pays
from torchq.runtimes.qnn import Qnn
from torchq.runtimes.tensorrt import TensorRt
from torchq.runtimes.torch import Torch

__all__ = [
    "Codes",
    "Candidate",
    "Engine",
    "EngineModule",
    "ExecuTorch",
    "FastestReport",
    "FileEngine",
    "FileRules",
    "InspectReport",
    "NodePlacement",
    "inspect_onnx",
    "OnnxEngine",
    "OnnxRuntime",
    "OpenVino",
    "Pays",
    "Placement",
    "Qnn",
    "RUNTIMES",
    "Runtime",
    "Speed",
    "TensorRt",
    "Torch",
    "deploy",
    "speed",
]

for _runtime in (
    Torch(),
    OnnxRuntime(),
    OpenVino(),
    TensorRt(),
    ExecuTorch(),
    Qnn(),
    *CHIPS,
):
    RUNTIMES.add(_runtime.name, _runtime)
