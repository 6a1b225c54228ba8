"""What is wrong with a quantized model, and the call that mends it."""

from torchq.analysis.diagnosis.api import doctor
from torchq.analysis.diagnosis.finding import DoctorReport, Finding
from torchq.analysis.diagnosis.registry import CHECKS

__all__ = ["CHECKS", "DoctorReport", "Finding", "doctor"]
