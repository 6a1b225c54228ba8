"""ONNX: writing files that run as integers, retargeting them, and proof that they compute what the simulation does.

May import everything below: workflow, swap, nn, ... The optional packages are imported where they are used.
"""

from torchq.onnx.export import export_onnx
from torchq.onnx.inspect import InspectReport, NodePlacement, inspect_onnx
from torchq.onnx.report import ExportReport
from torchq.onnx.targets.retarget import retarget_onnx
from torchq.onnx.verify.metrics import LayerAgreement, OutputAgreement, VerifyReport
from torchq.onnx.verify.verify import verify_onnx

__all__ = [
    "ExportReport",
    "InspectReport",
    "LayerAgreement",
    "NodePlacement",
    "OutputAgreement",
    "VerifyReport",
    "export_onnx",
    "inspect_onnx",
    "retarget_onnx",
    "verify_onnx",
]
