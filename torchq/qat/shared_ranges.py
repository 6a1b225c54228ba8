"""Making quantizers share one range."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer, share_quantizers_
from torchq.utils import Pattern
from torchq.workflow import select_quantizers, weight_quantizers

__all__ = ["share_range"]


def share_range(model: nn.Module, patterns: Sequence[Pattern] | Pattern) -> TensorQuantizer:
    """Let all quantizers of activations that a pattern selects be one: calibrated together, learned together, exported with one scale.

    Needed where a runtime moves codes without requantizing: the inputs of a concatenation, the readers of one tensor. Survives
    ``deepcopy``, pickle, :func:`torchq.save` and state dicts, which hold the range under every path.

    Args:
        model: quantized; changed in place.
        patterns: as for :func:`torchq.disabled`. Of modules with weights only the input quantizers count.

    Returns:
        the quantizer that all now are. Where ranges were known, it has the largest.

    Raises:
        ConfigError: fewer than two quantizers, or descriptors that differ or are not per tensor.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model)
        >>> shared = torchq.qat.share_range(model, "*.input_quantizer")
        >>> model[0].input_quantizer is model[1].input_quantizer
        True
    """
    weights = weight_quantizers(model)
    chosen = [
        path
        for path, quantizer in select_quantizers(model, patterns).items()
        if id(quantizer) not in weights
    ]
    if len(chosen) < 2:
        raise ConfigError(
            f"share_range: {patterns!r} selects {chosen or 'no quantizer of activations'}; expected at least two"
        )
    return share_quantizers_(model, chosen)
