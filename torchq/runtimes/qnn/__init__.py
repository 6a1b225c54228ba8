"""Qualcomm QNN: rules of its files, and the emulator that runs them here."""

from torchq.runtimes.qnn.context import ContextReport, open_context
from torchq.runtimes.qnn.runtime import CHIPS, Qnn

__all__ = ["CHIPS", "ContextReport", "Qnn", "open_context"]
