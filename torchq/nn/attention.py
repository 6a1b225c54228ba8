"""Quantized attention: torch's layer with its packed projections, and the function as a module."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.nn.convert import QuantModule, register
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
            query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _product_descriptors(input: QuantDescriptor | None) -> tuple[QuantDescriptor | None, ...]:
    """Of query, transposed key, value and softmax, from the one for activations.

    The softmax lies in 0..1: without codes for negative numbers its grid is twice as fine. Blocks follow the axis that is summed over.
    """
    if input is None:
        return (None,) * 4
    second = input.replace(block_axis=-2) if input.block_size is not None and input.block_axis == -1 else input
    unsigned = {"unsigned": True, "narrow_range": False} if isinstance(input.num_bits, int) else {}
    return input, second, second, input.replace(**unsigned)


def _is_passive(quantizer: nn.Module) -> bool:
    """Whether a quantizer returns its input as it is and notes nothing."""
    return not isinstance(quantizer, TensorQuantizer) or (quantizer.mode == "off" and quantizer.pre_quant_scale is None)


def _lowest(dtype: torch.dtype) -> float:
    """What stands for minus infinity: a row that is masked out as a whole then stays finite, also when masks are added."""
    return torch.finfo(dtype).min / 4


def _additive(mask: Tensor, excluded: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores: from booleans (``excluded`` says where to look away), or from numbers."""
    if excluded is None:
        return mask.to(dtype).clamp(min=_lowest(dtype))
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(excluded, _lowest(dtype))


def _thirds(packed: Tensor) -> tuple[Tensor, ...]:
    """The parts of query, key and value; as slices, which exporters compute ahead."""
    size = packed.shape[0] // 3
    return tuple(packed.narrow(0, size * part, size) for part in range(3))


def _attend(
    quantizers: tuple[nn.Module, ...], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Result and weights of attention (..., L, D) with an additive mask, the operands of both products quantized."""
    of_query, of_key, of_value, of_weights = quantizers
    scores = of_query(query * scale) @ of_key(key.transpose(-2, -1))  # a transposition behind a quantizer would part the runtime's kernel
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = of_weights(F.dropout(weights, dropout_p) if dropout_p else weights)
    return weights @ of_value(value), weights


@register(ScaledDotProductAttention)
class QuantScaledDotProductAttention(QuantModule, ScaledDotProductAttention):
    """:class:`ScaledDotProductAttention` with the operands of both products quantized: scaled query, transposed key, softmax, value.

    The softmax has an unsigned grid. A row whose keys are all masked attends to all of them alike.
    """

    quantizers = ("input",)
    products: ClassVar[tuple[str, ...]] = ("input", "key", "value", "softmax")

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        super()._attach(**dict(zip(self.products, _product_descriptors(descriptors["input"]), strict=True)))

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
        if all(map(_is_passive, quantizers)):
            return super().forward(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if enable_gqa:
            key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], dim=-3) for x in (key, value))
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if attn_mask is not None:
            attn_mask = _additive(attn_mask, ~attn_mask if attn_mask.dtype is torch.bool else None, query.dtype)
        with constant_while_tracing():
            scale = 1 / math.sqrt(int(query.shape[-1])) if scale is None else scale
        return _attend(quantizers, query, key, value, attn_mask, dropout_p, scale)[0]


@register(nn.MultiheadAttention)
class QuantMultiheadAttention(QuantModule, nn.MultiheadAttention):
    """Quantized :class:`torch.nn.MultiheadAttention`: the same arguments, results and parameters.

    The inputs and weights of all four projections are quantized: ``input_quantizer``, ``key_quantizer``, ``value_quantizer`` and
    ``out_input_quantizer``; ``weight_quantizer`` (of the query), ``key_weight_quantizer``, ``value_weight_quantizer`` and
    ``out_weight_quantizer``, each on its part of ``in_proj_weight``. The operands of the two products have
    quantizers as well, ``query_heads_quantizer`` (of the scaled query), ``key_heads_quantizer``, ``value_heads_quantizer`` and
    ``softmax_quantizer`` (unsigned); they are off until :meth:`quantize_products`, which ``quantize_(..., target="openvino")`` calls.

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
    products: ClassVar[tuple[str, ...]] = ("query_heads", "key_heads", "value_heads", "softmax")

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        products = dict(zip(self.products, _product_descriptors(descriptors["input"]), strict=True))
        layers = dict.fromkeys(self.inputs, descriptors["input"]) | dict.fromkeys(self.weights, descriptors["weight"])
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
        for quantizer, weight in zip(self._chosen(self.weights), self._all_weights(), strict=True):
            if isinstance(quantizer, TensorQuantizer):
                yield quantizer, weight

    def _chosen(self, slots: tuple[str, ...]) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, f"{slot}_quantizer") for slot in slots)

    def _all_weights(self) -> tuple[Tensor, ...]:
        """Of query, key, value and output."""
        packed = cast("Tensor | None", self.in_proj_weight)
        projections = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if packed is None else _thirds(packed)
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
        passive = all(map(_is_passive, self._chosen((*self.inputs, *self.weights, *self.products))))
        if passive or (is_causal and attn_mask is None):  # which torch refuses
            options: dict[str, Any] = {"average_attn_weights": average_attn_weights, "is_causal": is_causal}
            return super().forward(query, key, value, key_padding_mask, need_weights, attn_mask, **options)
        if query.is_nested:
            raise QuantizationError("QuantMultiheadAttention: got a nested tensor; expected a padded one. Pass a key_padding_mask")
        batched = query.dim() == 3
        q, k, v = self._heads(*(self._batch_first(x, batched) for x in (query, key, value)))
        mask = self._mask(attn_mask, key_padding_mask, q)
        products, dropout_p = self._chosen(self.products), self.dropout if self.training else 0.0
        weights = None
        if need_weights or not all(map(_is_passive, products)):
            y, weights = _attend(products, q, k, v, mask, dropout_p, 1 / math.sqrt(self.head_dim))
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
        of_input, of_weight = self._chosen(("out_input", "out_weight"))
        y = F.linear(of_input(y.transpose(1, 2).flatten(2)), of_weight(self.out_proj.weight), self.out_proj.bias)
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        if not need_weights or weights is None:
            return y, None
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights.squeeze(0)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        return x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)

    def _heads(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Projected query, key and value as (N, heads, length, width), with the extra keys of ``add_bias_kv`` and ``add_zero_attn``."""
        biases = (None,) * 3 if self.in_proj_bias is None else _thirds(self.in_proj_bias)
        extras = (None, self.bias_k, self.bias_v)
        result = []
        of_inputs, of_weights = self._chosen(self.inputs), self._chosen(self.weights)
        rows = zip(inputs, self._all_weights(), biases, extras, of_inputs, of_weights, strict=False)  # the output comes later
        for number, (x, weight, bias, extra, of_input, of_weight) in enumerate(rows):
            x = F.linear(of_input(x), of_weight(weight), bias)
            if extra is not None:
                x = torch.cat([x, extra.expand(x.shape[0], -1, -1)], dim=1)
            x = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            result.append(F.pad(x, (0, 0, 0, 1)) if number and self.add_zero_attn else x)
        return tuple(result)

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor) -> Tensor | None:
        """One additive mask that broadcasts with (N, heads, L, S); True and -inf exclude. The extra keys are never masked."""
        masks = []
        if attn_mask is not None:
            per_head = attn_mask.dim() == 3
            masks.append(attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:]) if per_head else attn_mask)
        if key_padding_mask is not None:
            padded = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask.unsqueeze(0)
            masks.append(padded[:, None, None, :])
        if not masks:
            return None
        added = [_additive(mask, mask if mask.dtype is torch.bool else None, query.dtype) for mask in masks]
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        return F.pad(sum(added[1:], added[0]), (0, extra))
