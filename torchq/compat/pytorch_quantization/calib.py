"""Calibrators of pytorch-quantization."""

from torchq.compat.pytorch_quantization.calibrators import (
    HistogramCalibrator,
    MaxCalibrator,
    calibrate_weights,
)

__all__ = ["HistogramCalibrator", "MaxCalibrator", "calibrate_weights"]
