"""BatchNorms whose result is quantized, for the layer in front that they are folded into later.

A runtime that computes on integers between quantizers alone wants the result of a convolution
quantized. Where a BatchNorm follows, that is the result of the BatchNorm: its quantizer trains
there, and becomes the layer's own when :func:`torchq.fuse_` folds the BatchNorm.
"""

from torch import Tensor, nn

from torchq.nn.convert import QuantModule, register


class QuantNorm(QuantModule):
    """Base of BatchNorms with a quantizer of their result and of nothing else."""

    input_slots = ()
    weight_slots = ()
    may_quantize_output = True
    is_marker = True

    def forward(self, input: Tensor) -> Tensor:
        """Return the quantized result of the float forward."""
        result: Tensor = super().forward(input)
        return self.quantized_result(result, getattr(self, "output_quantizer", None))


@register(nn.BatchNorm1d)
class QuantBatchNorm1d(QuantNorm, nn.BatchNorm1d):
    """:class:`torch.nn.BatchNorm1d` with a quantized result."""


@register(nn.BatchNorm2d)
class QuantBatchNorm2d(QuantNorm, nn.BatchNorm2d):
    """:class:`torch.nn.BatchNorm2d` with a quantized result."""


@register(nn.BatchNorm3d)
class QuantBatchNorm3d(QuantNorm, nn.BatchNorm3d):
    """:class:`torch.nn.BatchNorm3d` with a quantized result."""


@register(nn.SyncBatchNorm)
class QuantSyncBatchNorm(QuantNorm, nn.SyncBatchNorm):
    """:class:`torch.nn.SyncBatchNorm` with a quantized result."""
