"""Control flow that the network decides."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Conditional(nn.Module):
    """Calls one of two modules, whichever a condition says: the ONNX operator If.

    Args:
        then_branch: called where the condition holds.
        else_branch: called where it does not; takes the same arguments.
    """

    is_traced_whole = True

    def __init__(self, then_branch: nn.Module, else_branch: nn.Module) -> None:
        super().__init__()
        self.then_branch, self.else_branch = then_branch, else_branch

    def forward(self, condition: Tensor | bool, *values: Any) -> Any:
        """Return what the chosen branch makes of ``values``."""
        if isinstance(condition, Tensor):
            condition = bool(condition.reshape(-1)[0])
        return (self.then_branch if condition else self.else_branch)(*values)
