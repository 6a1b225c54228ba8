"""Factors between activations and weights that leave the float model as it is."""

from torchq.ptq.smoothing.api import SmoothedGroup, SmoothReport, smooth_
from torchq.ptq.smoothing.awq import AWQGroup, AWQReport, awq_

__all__ = ["AWQGroup", "AWQReport", "SmoothReport", "SmoothedGroup", "awq_", "smooth_"]
