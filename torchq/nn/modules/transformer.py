"""Transformer layers that would otherwise read the weights of their children themselves."""

from __future__ import annotations

from torch import nn

from torchq.nn.convert import QuantModule, register


@register(nn.TransformerEncoderLayer)
class QuantTransformerEncoderLayer(QuantModule, nn.TransformerEncoderLayer):
    """:class:`torch.nn.TransformerEncoderLayer` that calls its children in eval mode too.

    In eval mode without gradients torch runs a fused kernel that reads the weights of ``linear1``
    and ``linear2`` directly, so that no quantizer sees them. The kernel exists only for ReLU and
    GELU, and the attribute ``activation_relu_or_gelu`` of the layer says which of them it has.
    The value 0 stands for neither and turns the kernel off.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True

    def on_convert(self) -> None:
        """Turn the fused kernel off."""
        self.fused_activation = self.activation_relu_or_gelu
        self.activation_relu_or_gelu = 0

    def on_revert(self) -> None:
        """Turn the fused kernel on again."""
        self.activation_relu_or_gelu = self.fused_activation
        del self.fused_activation


@register(nn.TransformerEncoder)
class QuantTransformerEncoder(QuantModule, nn.TransformerEncoder):
    """:class:`torch.nn.TransformerEncoder` that passes padded tensors to its layers.

    With a padding mask, in eval mode, torch packs the batch into a nested tensor for the fused
    kernel of the layers. Quantized layers do not accept nested tensors.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True

    def on_convert(self) -> None:
        """Turn nested tensors off."""
        self.float_nesting = self.use_nested_tensor
        self.use_nested_tensor = False

    def on_revert(self) -> None:
        """Give the module its own setting back."""
        self.use_nested_tensor = self.float_nesting
        del self.float_nesting
