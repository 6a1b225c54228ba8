"""Qualcomm QNN: rules of its files, and the emulator that runs them here."""

from torchq.runtimes.qnn.runtime import CHIPS, Qnn

__all__ = ["CHIPS", "Qnn"]
