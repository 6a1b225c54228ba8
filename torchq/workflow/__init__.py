"""Between quantizing and exporting a model: calibrate, switch quantizers, save, load, summarise.

The package may import swap, nn and below.
"""

from torchq.workflow.calibrate import CalibrationReport, calibrate, calibrate_weights
from torchq.workflow.correction import Correction
from torchq.workflow.foreign_files import embed_record_
from torchq.workflow.modes import (
    disabled,
    freeze_,
    is_quantized,
    quantizers,
    select_quantizers,
    weight_quantizers,
)
from torchq.workflow.state import load, load_model, save
from torchq.workflow.summary import LayerRow, Summary, SummaryRow, summary

__all__ = [
    "CalibrationReport",
    "Correction",
    "LayerRow",
    "Summary",
    "SummaryRow",
    "calibrate",
    "calibrate_weights",
    "disabled",
    "embed_record_",
    "freeze_",
    "is_quantized",
    "load",
    "load_model",
    "quantizers",
    "save",
    "select_quantizers",
    "summary",
    "weight_quantizers",
]
