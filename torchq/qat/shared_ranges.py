"""One range for the quantizers of several activations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer, share_quantizers_
from torchq.utils import Pattern
from torchq.workflow import select_quantizers, weight_quantizers

__all__ = ["share_range_"]


def share_range_(model: nn.Module, patterns: Sequence[Pattern] | Pattern) -> TensorQuantizer:
    """Let all activation quantizers that a pattern selects be one quantizer, in place.

    They are calibrated together, learned together and exported with one scale. A runtime needs
    that where it moves codes without requantizing them: at the inputs of a concatenation, or at
    the readers of one tensor. The sharing survives ``deepcopy``, pickle, :func:`torchq.save` and
    state dicts, which hold the range under every path.

    Args:
        model: a quantized model; changed in place.
        patterns: as for :func:`torchq.disabled`. Of modules with weights only the input
            quantizers count.

    Returns:
        The quantizer that all of them now are. If ranges were known, it has the largest.

    Raises:
        ConfigError: The patterns select fewer than two quantizers, or their descriptors differ or
            are not per tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> shared = torchq.qat.share_range_(model, "*.input_quantizer")
        >>> model[0].input_quantizer is model[1].input_quantizer
        True
    """
    weights = weight_quantizers(model)
    selected = select_quantizers(model, patterns)
    chosen = [path for path, quantizer in selected.items() if id(quantizer) not in weights]
    if len(chosen) < 2:
        raise ConfigError(
            f"share_range_: {patterns!r} selects {chosen or 'no quantizer of activations'}; "
            "expected at least two"
        )
    return share_quantizers_(model, chosen)
