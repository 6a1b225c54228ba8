"""torchq: quantize PyTorch models by swapping modules.

>>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
>>> report = torchq.quantize_(model, torchq.recipes.int8())
>>> torchq.calibrate(model, [torch.randn(8, 4)], progress=False)
>>> model(torch.randn(1, 4)).shape
torch.Size([1, 2])
"""

from torchq import calib, errors, formats, functional, nn, qat, recipes
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.fusion import FuseReport, fuse_
from torchq.lowering import deploy
from torchq.nn import TensorQuantizer, register
from torchq.onnx import export_onnx, inspect_onnx, verify_onnx
from torchq.swap import SwapReport, patch, plan, quantize_, restore_
from torchq.version import __version__
from torchq.workflow import calibrate, disabled, freeze_, load, save, summary

__all__ = [
    "FuseReport",
    "QuantConfig",
    "QuantDescriptor",
    "Rule",
    "SwapReport",
    "TensorQuantizer",
    "__version__",
    "calib",
    "calibrate",
    "deploy",
    "disabled",
    "errors",
    "export_onnx",
    "formats",
    "freeze_",
    "functional",
    "fuse_",
    "inspect_onnx",
    "load",
    "nn",
    "patch",
    "plan",
    "qat",
    "quantize_",
    "recipes",
    "register",
    "restore_",
    "save",
    "summary",
    "verify_onnx",
]
