"""What happens between the swap and the export: calibrate, switch quantizers, freeze, save, summarise.

May import swap, nn and below.
"""

from torchq.workflow.calibrate import calibrate, calibrate_weights
from torchq.workflow.modes import (
    disabled,
    freeze_,
    quantizers,
    select_quantizers,
    weight_quantizers,
)
from torchq.workflow.state import apply_record, load, save, swap_record
from torchq.workflow.summary import Summary, SummaryRow, summary

__all__ = [
    "Summary",
    "SummaryRow",
    "apply_record",
    "calibrate",
    "calibrate_weights",
    "disabled",
    "freeze_",
    "load",
    "quantizers",
    "save",
    "select_quantizers",
    "summary",
    "swap_record",
    "weight_quantizers",
]
