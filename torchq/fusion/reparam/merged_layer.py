"""A merged layer as data, and the modules and records that are made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from torchq.errors import FuseError
from torchq.fusion import schema
from torchq.fusion.batchnorm.fold import replace_parameter
from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.symbolic import Geometry
from torchq.fusion.modules import CONVOLUTIONS, is_layer

__all__ = ["MergedLayer", "geometry_of"]

#: A record may ask for a layer of this many times the weights of the branches that it replaces,
#: or of this many weights. What is larger is damaged.
_MOST_TIMES, _MOST_WEIGHTS = 64, 2**20


def geometry_of(layer: Any) -> Geometry | None:
    """Return the geometry of a layer's dense kernel.

    Transposed convolutions, padding by name and padding other than by zeros have none.
    """
    if isinstance(layer, nn.Linear):
        return Geometry(layer.in_features, layer.out_features, 1, (), (), (), ())
    if not isinstance(layer, CONVOLUTIONS) or isinstance(layer.padding, str):
        return None
    if layer.padding_mode != "zeros" and any(layer.padding):
        return None
    window = tuple(d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True))
    padding, stride = layer.padding, layer.stride
    return Geometry(
        layer.in_channels, layer.out_channels, layer.groups, window, padding, padding, stride
    )


@dataclass(frozen=True)
class MergedLayer:
    """One convolution or linear layer that replaces a whole linear part.

    Attributes:
        geometry: a geometry of symmetric padding.
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
        """Return the layer with the dtype, device and mode of ``block``."""
        weights = [module.weight for module in block.modules() if is_layer(module)]
        tensors: list[Tensor] = [
            t for t in (*weights, *block.parameters(), *block.buffers()) if t.is_floating_point()
        ]
        trainable = any(parameter.requires_grad for parameter in block.parameters())
        channels_last = any(map(_is_channels_last, tensors))
        like = tensors[0]
        return cls(
            geometry, value, like.dtype, like.device, trainable, block.training, channels_last
        )

    @classmethod
    def from_record(cls, record: Any, block: nn.Module) -> MergedLayer:
        """Return a layer of zeros with the geometry that :meth:`record` wrote.

        Raises:
            ConfigError: ``record`` is damaged.
            FuseError: the layer does not go with ``block``.
        """
        geometry = _geometry_from(record)
        weights = sum(parameter.numel() for parameter in block.parameters())
        if geometry.kernel_numel > max(_MOST_WEIGHTS, _MOST_TIMES * weights):
            raise FuseError(
                f"apply_fusion_record_: got a layer of {geometry.kernel_numel} weights for a"
                f" {type(block).__name__} of {weights}. The record is damaged"
            )
        kernel = torch.zeros(
            geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.window
        )
        return cls.of(geometry, KernelBias(kernel, torch.zeros(geometry.out_channels)), block)

    def record(self) -> dict[str, Any]:
        """Return class and constructor arguments of the module, as JSON data."""
        g = self.geometry
        if g.spatial_dims == 0:
            return {"class": "Linear", "in_features": g.in_channels, "out_features": g.out_channels}
        return {
            "class": f"Conv{g.spatial_dims}d",
            "in_channels": g.in_channels,
            "out_channels": g.out_channels,
            "kernel_size": list(g.window),
            "stride": list(g.stride),
            "padding": list(g.before),
            "groups": g.groups,
        }

    def like(self, block: nn.Module) -> MergedLayer:
        """Return the same map for another copy of the block, say in float64."""
        return MergedLayer.of(self.geometry, self.value, block)

    def make(self) -> nn.Module:
        """Return a new module."""
        g = self.geometry
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        if g.spatial_dims == 0:
            layer: nn.Module = skip_init(nn.Linear, g.in_channels, g.out_channels, **options)
        else:
            cls = CONVOLUTIONS[g.spatial_dims - 1]
            arguments = (g.in_channels, g.out_channels, g.window, g.stride, g.before, 1, g.groups)
            layer = skip_init(cls, *arguments, **options)
        self.put_into(layer)
        if self.channels_last and g.spatial_dims == 2:
            layer.to(memory_format=torch.channels_last)
        return layer.train(self.training).requires_grad_(self.trainable)

    def put_into(self, layer: Any) -> None:
        """Give an existing layer of this geometry the merged parameters."""
        if not isinstance(layer, nn.Linear) and set(layer.dilation) != {1}:
            layer.kernel_size = self.geometry.window
            layer.dilation = (1,) * self.geometry.spatial_dims
        replace_parameter(layer, "weight", self.value.kernel)
        replace_parameter(layer, "bias", self.value.bias)


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and not tensor.is_contiguous()
        and tensor.is_contiguous(memory_format=torch.channels_last)
    )


def _geometry_from(record: Any) -> Geometry:
    """Return the geometry that :meth:`MergedLayer.record` describes."""
    kind = schema.text(record, "class")
    if kind == "Linear":
        schema.expect_keys(record, "class", "in_features", "out_features")
        size = (schema.count(record, "in_features"), schema.count(record, "out_features"))
        return Geometry(*size, 1, (), (), (), ())
    dims = {f"Conv{n}d": n for n in (1, 2, 3)}.get(kind)
    if dims is None:
        raise schema.damaged(record, "class", "Linear, Conv1d, Conv2d or Conv3d")
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "groups")
    schema.expect_keys(record, "class", *names)
    window = schema.counts(record, "kernel_size", dims)
    stride = schema.counts(record, "stride", dims)
    padding = schema.counts(record, "padding", dims, least=0)
    channels, out = schema.count(record, "in_channels"), schema.count(record, "out_channels")
    groups = schema.count(record, "groups")
    if channels % groups or out % groups:
        raise schema.damaged(record, "groups", "a divisor of the channels")
    return Geometry(channels, out, groups, window, padding, padding, stride)
