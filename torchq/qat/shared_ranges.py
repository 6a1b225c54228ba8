"""One range for the quantizers of several activations, and ranges that all processes share."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer, share_quantizers_
from torchq.utils import Pattern
from torchq.workflow import quantizers, select_quantizers, weight_quantizers

__all__ = ["replicate_ranges_", "share_range_"]


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


def replicate_ranges_(
    model: nn.Module, group: dist.ProcessGroup | None = None
) -> set[nn.Parameter]:
    """Keep learned ranges whole on every rank: their gradients are averaged from now on, in place.

    FSDP2 (``torch.distributed.fsdp.fully_shard``) shards no parameter without a dimension, which a
    learned range per tensor is. Call this first, and let ``fully_shard`` ignore what it returns.

    Args:
        model: with learned ranges, which are equal on all ranks; see ``group`` of
            :func:`torchq.qat.prepare`.
        group: the processes that train together; None means all.

    Returns:
        The parameters, for ``fully_shard(..., ignored_params=...)``. Empty without learned ranges.

    Raises:
        ConfigError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "replicate_ranges_: got no process group; expected torch.distributed to be initialised"
        )
    ranges = {end for q in quantizers(model).values() for end in q.parameters(recurse=False)}

    def average(parameter: Tensor) -> None:
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)

    for parameter in ranges:
        parameter.register_post_accumulate_grad_hook(average)
    return ranges
