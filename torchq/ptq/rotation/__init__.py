"""Rotation of the residual stream, which spreads outliers over all channels."""

from torchq.ptq.rotation.api import RotationReport, hadamard_

__all__ = ["RotationReport", "hadamard_"]
