"""Quantized attention: torch's layer with its packed projections, and the function as a module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register
from torchq.nn.modules.attending import ProjectedAttention, additive, attend, is_passive
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import constant_while_tracing

__all__ = ["QuantMultiheadAttention", "QuantScaledDotProductAttention", "ScaledDotProductAttention"]


class ScaledDotProductAttention(nn.Module):
    """:func:`torch.nn.functional.scaled_dot_product_attention` as a module, so that its operands can have quantizers."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def _product_descriptors(input: QuantDescriptor | None) -> tuple[QuantDescriptor | None, ...]:
    """Of query, transposed key, value and softmax, from the one for activations.

    The softmax lies in 0..1: without codes for negative numbers its grid is twice as fine. Blocks follow the axis that is summed over.
    """
    if input is None:
        return (None,) * 4
    second = (
        input.replace(block_axis=-2)
        if input.block_size is not None and input.block_axis == -1
        else input
    )
    unsigned = {"unsigned": True, "narrow_range": False} if isinstance(input.num_bits, int) else {}
    return input, second, second, input.replace(**unsigned)


def _thirds(packed: Tensor) -> tuple[Tensor, ...]:
    """The parts of query, key and value; as slices, which exporters compute ahead."""
    size = packed.shape[0] // 3
    return tuple(packed.narrow(0, size * part, size) for part in range(3))


@register(ScaledDotProductAttention)
class QuantScaledDotProductAttention(QuantModule, ScaledDotProductAttention):
    """:class:`ScaledDotProductAttention` with the operands of both products quantized: scaled query, transposed key, softmax, value.

    The softmax has an unsigned grid. A row whose keys are all masked attends to all of them alike.
    """

    quantizers = ("input",)
    products: ClassVar[tuple[str, ...]] = ("input", "key", "value", "softmax")

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        super()._attach(
            **dict(zip(self.products, _product_descriptors(descriptors["input"]), strict=True))
        )

    def _detach(self) -> None:
        for slot in self.products:
            delattr(self, f"{slot}_quantizer")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        quantizers = tuple(getattr(self, f"{slot}_quantizer") for slot in self.products)
        if all(map(is_passive, quantizers)):
            return super().forward(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
            )
        if enable_gqa:
            key, value = (
                x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value)
            )
        if is_causal:
            attn_mask = torch.ones(
                query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
            ).tril()
        if attn_mask is not None:
            attn_mask = additive(
                attn_mask, ~attn_mask if attn_mask.dtype is torch.bool else None, query.dtype
            )
        with constant_while_tracing():
            scale = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale
        return attend(quantizers, query, key, value, attn_mask, dropout_p, scale)[0]


@register(nn.MultiheadAttention)
class QuantMultiheadAttention(QuantModule, ProjectedAttention, nn.MultiheadAttention):
    """Quantized :class:`torch.nn.MultiheadAttention`: the same arguments, results and parameters.

    The inputs and weights of all four projections are quantized: ``input_quantizer``, ``key_quantizer``, ``value_quantizer`` and
    ``out_input_quantizer``; ``weight_quantizer`` (of the query), ``key_weight_quantizer``, ``value_weight_quantizer`` and
    ``out_weight_quantizer``, each on its part of ``in_proj_weight``. The operands of the two products have
    quantizers as well, ``query_heads_quantizer`` (of the scaled query), ``key_heads_quantizer``, ``value_heads_quantizer`` and
    ``softmax_quantizer`` (unsigned); they are off until :meth:`quantize_products`, which ``quantize_`` calls with the targets
    "onnxruntime" and "openvino".

    With every quantizer off this is torch's own forward, bit for bit. Otherwise a row whose keys are all masked attends to all of them
    alike, where torch gives NaN or zero.

    Raises:
        QuantizationError: an input is a nested tensor, which only torch's fused kernel takes.

    Example:
        >>> attention = torchq.nn.QuantMultiheadAttention(8, 2, batch_first=True)
        >>> tokens = torch.randn(1, 5, 8)
        >>> attention(tokens, tokens, tokens)[0].shape
        torch.Size([1, 5, 8])
    """

    inputs: ClassVar[tuple[str, ...]] = ("input", "key", "value", "out_input")
    weights: ClassVar[tuple[str, ...]] = ("weight", "key_weight", "value_weight", "out_weight")

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        products = dict(zip(self.products, _product_descriptors(descriptors["input"]), strict=True))
        layers = dict.fromkeys(self.inputs, descriptors["input"]) | dict.fromkeys(
            self.weights, descriptors["weight"]
        )
        super()._attach(**layers, **products)
        self.quantize_products(False)

    def _detach(self) -> None:
        for slot in (*self.inputs, *self.weights, *self.products):
            delattr(self, f"{slot}_quantizer")

    def quantize_products(self, enabled: bool = True) -> None:
        """Switch the quantizers of the operands of both matrix products on or off; calibrate them afterwards."""
        for quantizer in self._chosen(self.products):
            if isinstance(quantizer, TensorQuantizer):
                quantizer.mode = "quantize" if enabled else "off"

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        for quantizer, weight in zip(
            self._chosen(self.weights), self.projection_weights(), strict=True
        ):
            if isinstance(quantizer, TensorQuantizer):
                yield quantizer, weight

    def projection_weights(self) -> tuple[Tensor, ...]:
        """Those of query, key, value and output, each (out, in)."""
        packed = cast("Tensor | None", self.in_proj_weight)
        projections = (
            (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if packed is None
            else _thirds(packed)
        )
        return (*projections, self.out_proj.weight)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        passive = all(map(is_passive, self._chosen((*self.inputs, *self.weights, *self.products))))
        forward = nn.MultiheadAttention.forward if passive else ProjectedAttention.forward
        options: dict[str, Any] = {
            "average_attn_weights": average_attn_weights,
            "is_causal": is_causal,
        }
        return forward(
            self, query, key, value, key_padding_mask, need_weights, attn_mask, **options
        )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        biases = (None,) * 3 if self.in_proj_bias is None else _thirds(self.in_proj_bias)
        slots = self._chosen(self.inputs), self._chosen(self.weights)
        rows = zip(
            (query, key, value), self.projection_weights(), biases, *slots, strict=False
        )  # the output comes later
        return [
            F.linear(of_input(x), of_weight(weight), bias)
            for x, weight, bias, of_input, of_weight in rows
        ]

    def _project_out(self, x: Tensor) -> Tensor:
        of_input, of_weight = self._chosen(("out_input", "out_weight"))
        return F.linear(of_input(x), of_weight(self.out_proj.weight), self.out_proj.bias)
