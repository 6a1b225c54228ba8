"""The float model inside a quantized one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchq.workflow import quantizers

__all__ = ["quantizers_off"]


@contextmanager
def quantizers_off(model: nn.Module) -> Iterator[None]:
    """Turn all quantizers of ``model`` off; give them their modes back at the end."""
    before = [(quantizer, quantizer.mode) for quantizer in quantizers(model).values()]
    try:
        for quantizer, _ in before:
            quantizer.mode = "off"
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode
