"""Seeing what quantization does to a model, and deciding what to do about it."""

from torchq.analysis.diagnosis import CHECKS, DoctorReport, Finding, doctor
from torchq.analysis.layer_errors import LayerError, LayerErrors, QuantizerRow, layer_errors
from torchq.analysis.mixed import FrontPoint, LayerChoice, MixedPrecision, mixed_precision
from torchq.analysis.page import Report, check_path, compare, compare_outputs, report
from torchq.analysis.ranking import SensitivityReport, SensitivityRow, sensitivity

__all__ = [
    "CHECKS",
    "DoctorReport",
    "Finding",
    "FrontPoint",
    "LayerChoice",
    "MixedPrecision",
    "LayerError",
    "LayerErrors",
    "QuantizerRow",
    "Report",
    "SensitivityReport",
    "SensitivityRow",
    "check_path",
    "compare",
    "compare_outputs",
    "doctor",
    "layer_errors",
    "mixed_precision",
    "report",
    "sensitivity",
]
