"""Putting quantizers into a model: plan everything, then swap it; undo; patch what is built.

The package may import nn, config, recipes and below.
"""

from torchq.swap.apply import quantize_, restore_
from torchq.swap.decisions import Decision, SwapReport, decide
from torchq.swap.patch import Patch, patch
from torchq.swap.plan import plan

__all__ = [
    "Decision",
    "Patch",
    "SwapReport",
    "decide",
    "patch",
    "plan",
    "quantize_",
    "restore_",
]
