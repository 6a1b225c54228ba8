"""Calibrators of pytorch-quantization."""

from torchq.compat.pytorch_quantization.calib.histogram import (
    HistogramCalibrator,
    calibrate_weights,
)
from torchq.compat.pytorch_quantization.calib.max import MaxCalibrator

__all__ = ["HistogramCalibrator", "MaxCalibrator", "calibrate_weights"]
