"""Putting quantizers into a model: plan everything, then swap it; undo; patch what is built.

The package may import nn, config, recipes and below.
"""

from torchq.swap.apply import apply_, plan_of, restore_
from torchq.swap.patch import Patch, patch
from torchq.swap.plan import Decision, Plan
from torchq.swap.planning import plan, quantize_

__all__ = [
    "Decision",
    "Patch",
    "Plan",
    "apply_",
    "patch",
    "plan",
    "plan_of",
    "quantize_",
    "restore_",
]
