"""What recurrent layers need to quantize a hidden state at each step."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.modules.attention import is_passive
from torchq.nn.tensor_quantizer import TensorQuantizer


def hidden_descriptor(input: QuantDescriptor | None) -> QuantDescriptor | None:
    """Return how a hidden state is quantized where inputs are quantized as ``input`` says.

    It is the same, but signed: most hidden states have both signs, whatever the inputs.
    """
    signed = input is None or input.unsigned is not True
    return input if signed else cast(QuantDescriptor, input).replace(unsigned=False)


class StepQuantizer:
    """A quantizer that is called at each step; what it only observes, it sees at once."""

    def __init__(self, quantizer: nn.Module) -> None:
        self._quantizer = quantizer
        self._notes = isinstance(quantizer, TensorQuantizer) and not quantizer.quantizing
        self._noted: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized, or note it for :meth:`finish`."""
        if self._notes:
            self._noted.append(x)
            return x
        return cast(Tensor, self._quantizer(x))

    def finish(self) -> None:
        """Show the quantizer what was noted."""
        if self._noted and not is_passive(self._quantizer):
            self._quantizer(torch.cat(self._noted))
