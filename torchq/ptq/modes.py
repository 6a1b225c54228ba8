"""The float model inside a quantized one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchq.nn import modes_kept
from torchq.workflow import quantizers, weight_quantizers

__all__ = ["quantizers_off"]


@contextmanager
def quantizers_off(model: nn.Module, *, weights_only: bool = False) -> Iterator[None]:
    """Turn the quantizers of ``model`` off; give them their modes back at the end.

    Args:
        model: quantized.
        weights_only: leave the quantizers of activations as they are.
    """
    found = list(quantizers(model).values())
    if weights_only:
        weights = weight_quantizers(model)
        found = [quantizer for quantizer in found if id(quantizer) in weights]
    with modes_kept(found):
        for quantizer in found:
            quantizer.mode = "off"
        yield
