"""Qualcomm QNN: rules of its files, and the emulator that runs them here."""

from torchq.runtimes.qnn.bounds import BOUNDS
from torchq.runtimes.qnn.context import ContextReport, open_context
from torchq.runtimes.qnn.runtime import CHIPS, Qnn

__all__ = ["BOUNDS", "CHIPS", "ContextReport", "Qnn", "open_context"]
