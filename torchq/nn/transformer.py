"""Transformer layers that would bypass their children."""

from __future__ import annotations

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register

__all__ = ["QuantTransformerEncoderLayer"]


@register(nn.TransformerEncoderLayer)
class QuantTransformerEncoderLayer(QuantModule, nn.TransformerEncoderLayer):
    """A :class:`torch.nn.TransformerEncoderLayer` that calls its children in eval mode too.

    In eval mode without gradients torch takes a fused kernel that reads the weights of ``linear1`` and ``linear2`` itself,
    past any quantizer. The kernel exists for ReLU and GELU alone, and the layer says with ``activation_relu_or_gelu`` which
    one it has; 0 stands for neither and turns the kernel off.
    """

    quantizers = ()
    is_container = True

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        self.fused_activation = self.activation_relu_or_gelu
        self.activation_relu_or_gelu = 0

    def _detach(self) -> None:
        self.activation_relu_or_gelu = self.fused_activation
        del self.fused_activation
