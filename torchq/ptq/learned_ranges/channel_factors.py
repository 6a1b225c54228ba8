"""Factors of channels that are learned together with the ranges of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from torchq.formats import PerAxis
from torchq.functional import learned_fake_quantize
from torchq.nn import TensorQuantizer
from torchq.ptq.adaround.learned_block import LearnedRange
from torchq.ptq.channels import scale_inputs_, scale_outputs_
from torchq.ptq.learned_ranges.channel_classes import ChannelClasses, LayerChannels
from torchq.ptq.ranks import Group, all_sums

__all__ = ["ChannelFactors", "FactoredRange", "start_at_power_"]

# Logarithms of the least and the largest factor at the start. Rare values of a channel that is
# almost always 0 need more range than its power tells.
_LEAST, _MOST = -1.5, 4.0


class ChannelFactors:
    """One factor of each class of channels, learned as a logarithm.

    Args:
        classes: of the channels of a model.
        device: where its tensors are.
    """

    def __init__(self, classes: ChannelClasses, device: torch.device | None = None) -> None:
        self.classes = classes
        self.log = torch.zeros(
            classes.count, dtype=torch.float32, device=device, requires_grad=True
        )

    def of(self, channels: tuple[int, ...]) -> Tensor:
        """Return the factor of each channel, differentiable; 1 for those without a class."""
        index = torch.tensor(channels, device=self.log.device)
        padded = torch.cat([self.log, self.log.new_zeros(1)])  # index -1
        return padded[index].exp()

    @torch.no_grad()
    def fold_(self) -> None:
        """Divide channels by their factors where layers make them, and multiply where they read.

        Layers with a quantized weight get weight ranges that fit.
        """
        for layer in self.classes.layers.values():
            if {*layer.reads, *layer.makes} == {-1}:
                continue
            scale_inputs_(layer.module, self.of(layer.reads))
            scale_outputs_(layer.module, 1 / self.of(layer.makes))
            quantizer = getattr(layer.module, "weight_quantizer", None)
            if isinstance(quantizer, TensorQuantizer) and quantizer.calibrated:
                quantizer.calibrate_on(layer.module.weight)


class FactoredRange(LearnedRange):
    """A range of a tensor whose channels are divided by factors.

    Args:
        layer: the classes of the channels of what reads the tensor.
        quantizer: the input quantizer of this layer.
        factors: of all classes.
    """

    def __init__(
        self, layer: LayerChannels, quantizer: TensorQuantizer, factors: ChannelFactors
    ) -> None:
        super().__init__(quantizer, 0.0, torch.Generator())
        self.layer, self.factors = layer, factors
        self._granularity = PerAxis((-1,) if isinstance(layer.module, nn.Linear) else (1,))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` as if it were divided, fake quantized and multiplied again.

        That is one range for each channel.
        """
        shape = [1] * x.dim()
        shape[self._granularity.axes[0]] = -1
        factor = self.factors.of(self.layer.reads).view(shape)
        d = self.quantizer.descriptor
        *low, amax = [end * (d.scale_amax or 1.0) * factor for end in self.ends()]
        amin = low[0] if low else None
        return learned_fake_quantize(x, amax, d.format, self._granularity, None, amin)


@torch.no_grad()
def start_at_power_(
    ranges: Mapping[int, FactoredRange],
    factors: ChannelFactors,
    run: Any,
    batch: Any,
    group: Group,
) -> None:
    """Start with factors that make the channels of each tensor equally large, on average.

    The overall size of a tensor over its range stays the same.

    Args:
        ranges: id of an input quantizer -> what is learned of it.
        factors: changed in place.
        run: from a batch to the output of the model.
        batch: what the sizes are measured on.
        group: processes that measure together.
    """
    power: dict[int, Tensor] = {}

    def hook_for(key: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            x = args[0].detach().float()
            axis = ranges[key].layer.module
            dim = x.dim() - 1 if isinstance(axis, nn.Linear) else 1
            power[key] = x.square().mean([d for d in range(x.dim()) if d != dim])

        return hook

    with ExitStack() as stack:
        for key, one in ranges.items():
            hook = one.quantizer.register_forward_pre_hook(hook_for(key))
            stack.callback(hook.remove)
        run(batch)
    sums = all_sums(list(power.values()), group)
    power = dict(zip(power, sums, strict=True))
    total, count = torch.zeros_like(factors.log), torch.zeros_like(factors.log)
    for key, size in power.items():
        index = torch.tensor(ranges[key].layer.reads, device=size.device)
        log = 0.5 * size.clamp(min=1e-20).log()
        log = (log - log.median()).clamp(_LEAST, _MOST)
        known = index >= 0
        total.index_add_(0, index[known], log[known])
        count.index_add_(0, index[known], torch.ones_like(log[known]))
    factors.log += total / count.clamp(min=1)
    for key, size in power.items():
        scaled = size / factors.of(ranges[key].layer.reads).square()
        change = 0.5 * (scaled.sum() / size.sum().clamp(min=1e-20)).clamp(min=1e-20).log()
        for log in ranges[key].logs:
            log += change
