"""Seeing what quantization does to a model, and deciding what to do about it."""

from torchq.analysis.checks import CHECKS, Finding
from torchq.analysis.detections import Detected, DetectionAgreement, Detections
from torchq.analysis.doctor import DoctorReport, doctor
from torchq.analysis.forecast import Forecast, TargetForecast, TimedFile, forecast
from torchq.analysis.layer_errors import (
    LayerError,
    LayerErrors,
    QuantizerRow,
    layer_errors,
)
from torchq.analysis.mixed_precision import (
    FrontPoint,
    LayerChoice,
    MixedPrecision,
    mixed_precision,
)
from torchq.analysis.outputs import compare_outputs
from torchq.analysis.page import Report, check_path, compare, report
from torchq.analysis.sensitivity import SensitivityReport, SensitivityRow, sensitivity

__all__ = [
    "CHECKS",
    "Detected",
    "DetectionAgreement",
    "Detections",
    "DoctorReport",
    "Finding",
    "Forecast",
    "FrontPoint",
    "LayerChoice",
    "MixedPrecision",
    "LayerError",
    "LayerErrors",
    "QuantizerRow",
    "Report",
    "SensitivityReport",
    "SensitivityRow",
    "TargetForecast",
    "TimedFile",
    "check_path",
    "compare",
    "compare_outputs",
    "doctor",
    "forecast",
    "layer_errors",
    "mixed_precision",
    "report",
    "sensitivity",
]
