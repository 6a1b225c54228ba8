"""Factors between activations and weights that leave the float model as it is."""

from torchq.ptq.smoothing.api import SmoothedGroup, SmoothReport, smooth_

__all__ = ["SmoothReport", "SmoothedGroup", "smooth_"]
