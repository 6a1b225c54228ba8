"""A run of a model before its export, in float, which leaves the model as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchq.graph import call_model
from torchq.nn import switched_off
from torchq.utils import evaluating, state_kept
from torchq.workflow import quantizers


def run_in_float(model: nn.Module, example: object) -> Any:
    """Return what a model computes in eval mode with its quantizers off; it keeps its state."""
    in_float = switched_off(quantizers(model).values())
    with torch.no_grad(), state_kept(model), evaluating(model), in_float:
        return call_model(model, example)
