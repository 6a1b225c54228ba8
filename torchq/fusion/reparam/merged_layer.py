"""A merged layer as data, and the modules it is written to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from torchq.fusion.batchnorm.fold import replace_parameter
from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.symbolic import Geometry
from torchq.fusion.modules import CONVOLUTIONS, is_layer

__all__ = ["MergedLayer", "geometry_of", "rank_of"]


def rank_of(module: Any) -> int:
    """Spatial dimensions of a layer or BatchNorm; 0 for a linear layer."""
    if isinstance(module, nn.Linear):
        return 0
    for rank, kinds in enumerate(
        ((nn.Conv1d, nn.BatchNorm1d), (nn.Conv2d,), (nn.Conv3d, nn.BatchNorm3d)), start=1
    ):
        if isinstance(module, kinds):
            return rank
    return 2


def geometry_of(layer: Any) -> Geometry | None:
    """The geometry of a layer's dense kernel; None for transposed convolutions, padding by name and padding other than by zeros."""
    if isinstance(layer, nn.Linear):
        return Geometry(layer.in_features, layer.out_features, 1, (), (), (), ())
    if (
        not isinstance(layer, CONVOLUTIONS)
        or isinstance(layer.padding, str)
        or (layer.padding_mode != "zeros" and any(layer.padding))
    ):
        return None
    window = tuple(d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    return Geometry(
        layer.in_channels,
        layer.out_channels,
        layer.groups,
        window,
        layer.padding,
        layer.padding,
        layer.stride,
    )


@dataclass(frozen=True)
class MergedLayer:
    """One convolution or linear layer that replaces a whole linear part.

    Attributes:
        geometry: of symmetric padding.
        value: float64 kernel and bias.
        dtype, device, trainable, training, channels_last: what the module made of it is like.
    """

    geometry: Geometry
    value: KernelBias
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    training: bool
    channels_last: bool

    @classmethod
    def of(cls, geometry: Geometry, value: KernelBias, block: nn.Module) -> MergedLayer:
        """With the properties of ``block``'s parameters."""
        weights = [module.weight for module in block.modules() if is_layer(module)]
        tensors: list[Tensor] = [
            t for t in (*weights, *block.parameters(), *block.buffers()) if t.is_floating_point()
        ]
        wide = [
            t
            for t in tensors
            if t.dim() == 4
            and not t.is_contiguous()
            and t.is_contiguous(memory_format=torch.channels_last)
        ]
        trainable = any(parameter.requires_grad for parameter in block.parameters())
        return cls(
            geometry,
            value,
            tensors[0].dtype,
            tensors[0].device,
            trainable,
            block.training,
            bool(wide),
        )

    def like(self, block: nn.Module) -> MergedLayer:
        """The same map for another copy of the block, say in float64."""
        return MergedLayer.of(self.geometry, self.value, block)

    def make(self) -> nn.Module:
        """A new module."""
        g = self.geometry
        if g.rank == 0:
            layer: nn.Module = skip_init(
                nn.Linear, g.channels, g.out, dtype=self.dtype, device=self.device
            )
        else:
            cls = CONVOLUTIONS[g.rank - 1]
            layer = skip_init(
                cls,
                g.channels,
                g.out,
                g.window,
                g.stride,
                g.before,
                1,
                g.groups,
                dtype=self.dtype,
                device=self.device,
            )
        self.put_into(layer)
        if self.channels_last and g.rank == 2:
            layer.to(memory_format=torch.channels_last)
        return layer.train(self.training).requires_grad_(self.trainable)

    def put_into(self, layer: Any) -> None:
        """Give an existing layer of this geometry the merged parameters."""
        kernel = self.value.kernel
        if not isinstance(layer, nn.Linear) and set(layer.dilation) != {1}:
            layer.kernel_size, layer.dilation = self.geometry.window, (1,) * self.geometry.rank
        replace_parameter(layer, "weight", kernel)
        replace_parameter(layer, "bias", self.value.bias)
