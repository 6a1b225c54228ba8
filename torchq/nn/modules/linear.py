"""Quantized Linear and Embedding."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, register
from torchq.nn.correction import Corrected
from torchq.nn.integer_bias import kernel_bias


@register(nn.Linear)
class QuantLinear(Corrected, OutputScaling, QuantModule, nn.Linear):
    """Quantized :class:`torch.nn.Linear`; input (..., in_features).

    The bias stays float, or is rounded as a kernel of the target does. A runtime may want the
    result quantized too; see :meth:`QuantModule.quantize_output_`.
    """

    may_quantize_output = True

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of quantized input and quantized weight, with the bias."""
        x, weight = self.input_quantizer(input), self.weight_quantizer(self.weight)
        bias = kernel_bias(self, self.corrected_bias(self.bias))
        result = F.linear(x, self.corrected_weight(weight), bias)
        return self.quantized_result(result, getattr(self, "output_quantizer", None))


@register(nn.Embedding)
class QuantEmbedding(QuantModule, nn.Embedding):
    """Quantized :class:`torch.nn.Embedding`: looks up rows of ``weight_quantizer(weight)``.

    The indices are integers and have no quantizer. ``max_norm`` renormalises the float table first,
    as :class:`torch.nn.Embedding` does.
    """

    input_slots = ()

    def forward(self, input: Tensor) -> Tensor:
        """Return the quantized rows of the indices in ``input``."""
        if self.max_norm is not None:
            # This look-up renormalises the table in place.
            F.embedding(input, self.weight, self.padding_idx, self.max_norm, self.norm_type)
        weight = self.weight_quantizer(self.weight)
        options = (None, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return F.embedding(input, weight, self.padding_idx, *options)
