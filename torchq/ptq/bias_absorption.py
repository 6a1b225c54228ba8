"""High biases move through a ReLU into the next layer, so that activations have smaller ranges.

Where the input of a ReLU is above c for a channel, ``relu(x - c) = relu(x) - c``, so the bias of
one layer can be lower by c if that of the next layer is higher by its weights times c.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.1.3.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq.graph import Call, Flow
from torchq.ptq.channels import CONVOLUTIONS

__all__ = ["absorb_bias_", "has_only_relu_between"]

_PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
# The channels of how many standard deviations below the mean stay above 0.
_DEVIATIONS = 3


def has_only_relu_between(flow: Flow, first: Call, second: Call) -> bool:
    """Return True if a ReLU lies between two layers, and nothing else that computes."""
    index, relus = second.inputs[0], 0
    while index != first.index:
        call = flow.calls[index]
        is_relu = isinstance(call.module, nn.ReLU) or (
            call.module is None and call.name in ("relu", "relu_")
        )
        if not is_relu and not isinstance(call.module, _PASSING):
            return False
        relus += is_relu
        index = call.inputs[0]
    return relus > 0


def absorb_bias_(first: Any, second: Any, out: Tensor) -> int:
    """Move the high biases of ``first`` into ``second``, in place.

    The amount of a channel is ``max(0, mean - 3 deviations)`` of the output of ``first``, as in the
    paper, and no more than its smallest value, so that nothing changes on these data.

    Args:
        first: a layer with a bias.
        second: the layer that reads it through a ReLU.
        out: the output of ``first``.

    Returns:
        How many channels have a lower bias; 0 where a layer has no bias, or where ``second`` pads
        its input with zeros, which a higher input would not match.
    """
    if _pads(second) or first.bias is None or second.bias is None or not out.numel():
        return 0
    axis = -1 if isinstance(first, nn.Linear) else out.dim() - first.weight.dim() + 1
    values = out.movedim(axis, 0).flatten(1).double()
    high = values.mean(1) - _DEVIATIONS * values.std(1, correction=0)
    amount = high.minimum(values.amin(1)).clamp(min=0)
    groups = getattr(second, "groups", 1)
    weight = second.weight.double()
    columns = weight.flatten(2).sum(2) if weight.dim() > 2 else weight
    rows = columns.view(groups, -1, columns.shape[1])
    change = (rows @ amount.view(groups, -1, 1)).flatten()
    first.bias -= amount.to(first.bias.dtype)
    second.bias += change.to(second.bias.dtype)
    return int((amount > 0).sum())


def _pads(layer: Any) -> bool:
    """Return True if a layer may read zeros beside its input."""
    if isinstance(layer, nn.Linear):
        return False
    is_plain = isinstance(layer, CONVOLUTIONS) and layer.padding_mode == "zeros"
    return not is_plain or (layer.padding != "valid" and any(p != 0 for p in layer.padding))
