"""Parallel linear branches that are trained apart and quantized as the one kernel they amount to.

A RepVGG block is deployed as one convolution. Quantizing its branches one by one trains something
else than what runs, and quantizing the merged convolution alone gives up what the branches and
their BatchNorms do for training. :class:`QuantBranches` keeps the branches, computes the
equivalent kernel from them in every forward, differentiably, and fake-quantizes that kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.fusion import Branches
from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, convert_, register
from torchq.nn.tensor_quantizer import TensorQuantizer

__all__ = ["QuantBranches"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@register(Branches)
class QuantBranches(OutputScaling, QuantModule, Branches):
    """``conv(input_quantizer(x), weight_quantizer(kernel), bias)``, equivalent to its branches.

    In training mode, BatchNorms that are in training mode too see the float branches of the
    batch: their running statistics move, and the kernel is folded with the statistics of the
    batch, through which gradients flow (Krishnamoorthi, 1806.08342, section 3.2.3). Frozen
    BatchNorms (:func:`torchq.qat.freeze_bn_`) are folded with their running statistics, without
    that second pass: then the training forward is what is deployed, to the last bit.
    :func:`torchq.fuse_` turns the module into a quantized convolution.

    Args:
        *args: those of :class:`torchq.fusion.Branches`.
        **kwargs: those of :class:`torchq.fusion.Branches`, and the descriptors of
            :class:`QuantModule`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the result on ``x`` of shape ``(N, in_channels, *spatial)``."""
        x = self.input_quantizer(x)
        kernel, bias = self.equivalent(self._batch_statistics(x) if self.training else None)
        g = self.geometry
        convolve = _CONVOLVE[g.spatial_dims]
        return convolve(x, self.weight_quantizer(kernel), bias, g.stride, g.before, 1, g.groups)

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield the weight quantizer with the equivalent kernel, which is what it quantizes."""
        if isinstance(self.weight_quantizer, TensorQuantizer):
            yield self.weight_quantizer, self.equivalent()[0]

    def merge_into(self, layer: nn.Module) -> nn.Module:
        """Return ``layer`` as a quantized convolution with the kernel and quantizers of this."""
        merged: Any = super().merge_into(layer)
        convert_(merged)
        merged.input_quantizer = self.input_quantizer
        merged.weight_quantizer = self.weight_quantizer
        assert isinstance(merged, nn.Module)
        return merged.train(self.training)

    def _batch_statistics(self, x: Tensor) -> dict[str, Tensor]:
        """Return mean and variance of the input of each BatchNorm in training mode."""
        norms = {
            name: norm
            for name, norm in self.branches.named_modules()
            if isinstance(norm, _NORMS) and norm.training
        }
        found: dict[str, Tensor] = {}
        if not norms:
            return found

        def note(name: str, y: Tensor) -> None:
            variance, mean = torch.var_mean(y.float(), [0, *range(2, y.dim())], correction=0)
            found[f"{name}.running_mean"], found[f"{name}.running_var"] = mean, variance

        with ExitStack() as stack:
            for name, norm in norms.items():
                hook = norm.register_forward_pre_hook(
                    lambda module, args, name=name: note(name, args[0])
                )
                stack.callback(hook.remove)
            self.branches(x)
        return found
