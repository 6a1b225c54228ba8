"""Quantized Linear, Bilinear, Embedding and EmbeddingBag."""

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, register
from torchq.nn.correction import Corrected
from torchq.nn.integer_kernel import SimulatedProduct, integer_product


@register(nn.Linear)
class QuantLinear(SimulatedProduct, Corrected, OutputScaling, QuantModule, nn.Linear):
    """Quantized :class:`torch.nn.Linear`; input (..., in_features).

    The bias stays float, or is rounded as a kernel of the target does. A runtime may want the
    result quantized too; see :meth:`QuantModule.quantize_output_`.
    """

    may_quantize_output = True
    gives_float_results = True

    def forward(self, input: Tensor) -> Tensor:
        """Return the product of quantized input and quantized weight, with the bias."""
        result = integer_product(self, input, F.linear)
        if result is None:
            x, weight = self.input_quantizer(input), self.weight_quantizer(self.weight)
            result = self.simulated(x, weight, self.bias, F.linear)
        return self.quantized_result(result, getattr(self, "output_quantizer", None))


@register(nn.Bilinear)
class QuantBilinear(QuantModule, nn.Bilinear):
    """Quantized :class:`torch.nn.Bilinear`, each input with its own range; the bias stays float.

    The weight (out_features, in1_features, in2_features) has its output channels on axis 0.
    """

    input_slots = ("input1", "input2")

    input1_quantizer: nn.Module
    input2_quantizer: nn.Module

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        """Return the bilinear product of quantized inputs and weight, with the bias."""
        input1, input2 = self.input1_quantizer(input1), self.input2_quantizer(input2)
        return F.bilinear(input1, input2, self.weight_quantizer(self.weight), self.bias)


class _QuantTable(QuantModule):
    """Base of look-ups in a quantized table; the indices are integers and have no quantizer."""

    input_slots = ()


@register(nn.Embedding)
class QuantEmbedding(_QuantTable, nn.Embedding):
    """Quantized :class:`torch.nn.Embedding`: looks up rows of ``weight_quantizer(weight)``.

    ``max_norm`` renormalises the float table first, as :class:`torch.nn.Embedding` does.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the quantized rows of the indices in ``input``."""
        if self.max_norm is not None:
            # This look-up renormalises the table in place.
            F.embedding(
                input, self.weight, self.padding_idx, self.max_norm, self.norm_type
            )
        weight = self.weight_quantizer(self.weight)
        options = (None, self.norm_type, self.scale_grad_by_freq, self.sparse)
        return F.embedding(input, weight, self.padding_idx, *options)


@register(nn.EmbeddingBag)
class QuantEmbeddingBag(_QuantTable, nn.EmbeddingBag):
    """Quantized :class:`torch.nn.EmbeddingBag`: reduces rows of ``weight_quantizer(weight)``.

    ``max_norm`` renormalises the float table first, as :class:`torch.nn.EmbeddingBag` does.
    """

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the reduced quantized rows; the arguments are those of torch."""
        if self.max_norm is not None:
            # This look-up renormalises the table in place.
            F.embedding(
                input, self.weight, self.padding_idx, self.max_norm, self.norm_type
            )
        weight = self.weight_quantizer(self.weight)
        options = (self.norm_type, self.scale_grad_by_freq, self.mode, self.sparse)
        ends = (self.include_last_offset, self.padding_idx)
        return F.embedding_bag(
            input, weight, offsets, None, *options, per_sample_weights, *ends
        )
