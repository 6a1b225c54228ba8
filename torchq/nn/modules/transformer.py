"""Transformer layers that would bypass their children."""

from __future__ import annotations

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register

__all__ = ["QuantTransformerEncoder", "QuantTransformerEncoderLayer"]


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


@register(nn.TransformerEncoder)
class QuantTransformerEncoder(QuantModule, nn.TransformerEncoder):
    """A :class:`torch.nn.TransformerEncoder` that gives its layers padded tensors.

    With a padding mask, in eval mode, torch packs the batch into a nested tensor for the fused kernel of its layers, which no other
    code takes.
    """

    quantizers = ()
    is_container = True

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        self.float_nesting = self.use_nested_tensor
        self.use_nested_tensor = False

    def _detach(self) -> None:
        self.use_nested_tensor = self.float_nesting
        del self.float_nesting
