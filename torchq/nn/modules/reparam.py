"""Parallel linear branches that are trained apart and quantized as the one kernel that they amount to.

A RepVGG block is deployed as one convolution. Quantizing its branches one by one trains something else than what runs, and
quantizing the merged convolution alone gives up what the branches and their BatchNorms do for training. :class:`QuantBranches` keeps
the branches, computes the equivalent kernel from them in every forward, differentiably, and fake-quantizes that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchq.errors import QuantizationError
from torchq.fusion.linear_map.symbolic import Geometry, NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor
from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, register
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import evaluating

__all__ = ["Branches", "QuantBranches"]

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Branches(nn.Module):
    """The linear part of a re-parameterisable block, before its branches are merged.

    Args:
        branches: a module whose forward is one linear, shift-invariant map of a feature map (a sum of conv-BatchNorm branches).
        channels: of its input.
        rank: spatial dimensions, 1 to 3.

    Raises:
        QuantizationError: it is no such map, or one that only gradients could reveal.
    """

    def __init__(self, branches: nn.Module, channels: int, rank: int) -> None:
        super().__init__()
        self.branches, self.channels, self.rank = branches, channels, rank
        self.train(branches.training)
        self.geometry: Geometry = self._collapse({})[0]

    def forward(self, x: Tensor) -> Tensor:
        out = self.branches(x)
        assert isinstance(out, Tensor)
        return out

    def equivalent(self, statistics: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """Kernel and bias of the one convolution that the branches amount to, in their dtype, differentiable.

        Args:
            statistics: BatchNorm statistics by buffer name below ``branches``; default the running ones.
        """
        dtype = next((p.dtype for p in self.branches.parameters()), torch.float32)
        _, (kernel, bias) = self._collapse(statistics or {})
        return kernel.to(dtype), bias.to(dtype)

    def _collapse(self, statistics: dict[str, Tensor]) -> tuple[Geometry, tuple[Tensor, Tensor]]:
        device = next(
            (t.device for t in (*self.branches.parameters(), *self.branches.buffers())), None
        )
        source: Any = AffineTensor.identity(object(), self.channels, self.rank, device)
        try:
            with evaluating(self.branches):
                result = functional_call(self.branches, statistics, (source,))
        except NotAffine as reason:
            raise QuantizationError(
                f"{type(self.branches).__name__}: {reason}; expected a sum of linear branches. Merge it with fuse_"
            ) from None
        if not isinstance(result, AffineTensor):
            raise QuantizationError(
                f"{type(self.branches).__name__}: returns {type(result).__name__}; expected one map of its input"
            )
        return result.symmetric()

    def extra_repr(self) -> str:
        g = self.geometry
        return f"{g.channels}, {g.out}, kernel_size={g.window}, stride={g.stride}, padding={g.before}, groups={g.groups}"


@register(Branches)
class QuantBranches(OutputScaling, QuantModule, Branches):
    """``conv(input_quantizer(x), weight_quantizer(kernel), bias)`` with kernel and bias equivalent to the branches.

    In training mode, BatchNorms that are in training mode too see the float branches of the batch: their running statistics move, and
    the kernel is folded with the statistics of the batch, through which gradients flow (Krishnamoorthi, 1806.08342, section 3.2.3).
    Frozen ones (:func:`torchq.qat.freeze_bn_`) are folded with their running statistics, without that second pass: then the training
    forward is what is deployed, to the last bit. :func:`torchq.fuse_` turns the module into a quantized convolution.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_quantizer(x)
        kernel, bias = self.equivalent(self._batch_statistics(x) if self.training else None)
        g = self.geometry
        return _CONVOLVE[g.rank](
            x, self.weight_quantizer(kernel), bias, g.stride, g.before, 1, g.groups
        )

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """The equivalent kernel is what the weight quantizer sees."""
        if isinstance(self.weight_quantizer, TensorQuantizer):
            yield self.weight_quantizer, self.equivalent()[0]

    def _batch_statistics(self, x: Tensor) -> dict[str, Tensor]:
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
