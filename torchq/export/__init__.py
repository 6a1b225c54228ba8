"""ONNX: writing files that run as integers, retargeting them, and proof that they compute what the simulation does.

May import everything below: workflow, swap, nn, ... The optional packages are imported where they are used.
"""

from torchq.export.exporter import export_onnx
from torchq.export.report import ExportReport

__all__ = ["ExportReport", "export_onnx"]
