"""ONNX files that run as integers: writing, inspecting, and verifying them.

The optional packages (``onnx``, ``onnx_ir``, ``onnxscript``, ``onnxruntime``) are imported where
they are used first.
"""

from torchq.onnx.calibration_cache import (
    apply_calibration_cache,
    read_calibration_cache,
)
from torchq.onnx.dumps import (
    DumpedTensor,
    DumpReport,
    expected_codes,
    verify_dump,
)
from torchq.onnx.encodings import (
    EncodingsReport,
    apply_encodings,
    export_encodings,
    read_encodings,
)
from torchq.onnx.export import ExportReport, export_onnx
from torchq.onnx.verify.report import LayerAgreement, OutputAgreement, VerifyReport
from torchq.onnx.verify.verify import verify_onnx

__all__ = [
    "DumpReport",
    "DumpedTensor",
    "EncodingsReport",
    "ExportReport",
    "LayerAgreement",
    "OutputAgreement",
    "VerifyReport",
    "apply_calibration_cache",
    "apply_encodings",
    "expected_codes",
    "export_encodings",
    "export_onnx",
    "read_calibration_cache",
    "read_encodings",
    "verify_dump",
    "verify_onnx",
]
