"""Runs of a quantized model in float, which show what it does with tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from torchq.graph import state_kept
from torchq.nn import TensorQuantizer, modes_kept
from torchq.utils import evaluating


@contextmanager
def computing_in_float(model: nn.Module) -> Iterator[None]:
    """Let a model compute with all quantizers off, in eval mode; give its state back at the end."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    with modes_kept(quantizers), torch.no_grad(), evaluating(model), state_kept(model):
        for quantizer in quantizers:
            quantizer.mode = "off"
        yield
