"""Deployment: :func:`torchq.deploy`, and the engines whose kernels can run a calibrated model.

The package may import onnx, lowering and below.
"""

from torchq.engines.api import deploy
from torchq.engines.fastest import Candidate, FastestReport
from torchq.engines.graph_engine import EngineModule, GraphEngine
from torchq.engines.onnxruntime import OnnxRuntime
from torchq.engines.openvino import OpenVino
from torchq.engines.registry import ENGINES, Engine, register_engine
from torchq.engines.torch_engine import TorchEngine

__all__ = [
    "Candidate",
    "ENGINES",
    "Engine",
    "EngineModule",
    "FastestReport",
    "GraphEngine",
    "OnnxRuntime",
    "OpenVino",
    "TorchEngine",
    "deploy",
    "register_engine",
]
