"""Which layers hurt: each is quantized alone, or left out alone, and the output is compared."""

from torchq.analysis.ranking.api import sensitivity
from torchq.analysis.ranking.report import SensitivityReport, SensitivityRow

__all__ = ["SensitivityReport", "SensitivityRow", "sensitivity"]
