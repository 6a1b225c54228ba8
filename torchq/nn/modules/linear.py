"""Quantized Linear and Embedding."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, register

__all__ = ["QuantLinear", "QuantEmbedding"]


@register(nn.Linear)
class QuantLinear(OutputScaling, QuantModule, nn.Linear):
    """``linear(input_quantizer(x), weight_quantizer(weight), bias)``; input (..., in_features), the bias stays float."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(self.input_quantizer(input), self.weight_quantizer(self.weight), self.bias)


@register(nn.Embedding)
class QuantEmbedding(QuantModule, nn.Embedding):
    """Looks up rows of ``weight_quantizer(weight)``; the indices have no quantizer.

    ``max_norm`` renormalises the float table first, as :class:`torch.nn.Embedding` does.
    """

    quantizers = ("weight",)

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None:
            F.embedding(
                input, self.weight, self.padding_idx, self.max_norm, self.norm_type
            )  # renormalises in place
        weight = self.weight_quantizer(self.weight)
        return F.embedding(
            input,
            weight,
            self.padding_idx,
            None,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
