"""Putting quantizers into a model: decide everything (plan), then swap; undo; patch while a model is built.

May import nn, config, recipes and below.
"""

from torchq.swap.modules import quantize_, restore_
from torchq.swap.patch import Patch, patch
from torchq.swap.plan import Decision, SwapReport, decide, plan

__all__ = ["Decision", "Patch", "SwapReport", "decide", "patch", "plan", "quantize_", "restore_"]
