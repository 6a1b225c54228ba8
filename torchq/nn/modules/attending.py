"""Attention around its quantizers: masks, heads and both products."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import QuantizationError
from torchq.nn.tensor_quantizer import TensorQuantizer

__all__ = ["ProjectedAttention", "additive", "attend", "is_passive"]


def is_passive(quantizer: nn.Module) -> bool:
    """Whether a quantizer returns its input as it is and notes nothing."""
    return not isinstance(quantizer, TensorQuantizer) or (
        quantizer.mode == "off" and quantizer.pre_quant_scale is None
    )


def _lowest(dtype: torch.dtype) -> float:
    """What stands for minus infinity: a row that is masked out as a whole then stays finite, also when masks are added."""
    return torch.finfo(dtype).min / 4


def additive(mask: Tensor, excluded: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A mask to add to the scores: from booleans (``excluded`` says where to look away), or from numbers."""
    if excluded is None:
        return mask.to(dtype).clamp(min=_lowest(dtype))
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(
        excluded, _lowest(dtype)
    )


def attend(
    quantizers: tuple[nn.Module, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Result and weights of attention (..., L, D) with an additive mask, the operands of both products quantized."""
    of_query, of_key, of_value, of_weights = quantizers
    scores = of_query(query * scale) @ of_key(
        key.transpose(-2, -1)
    )  # a transposition behind a quantizer would part the runtime's kernel
    weights = (scores if mask is None else scores + mask).softmax(-1)
    weights = of_weights(F.dropout(weights, dropout_p) if dropout_p else weights)
    return weights @ of_value(value), weights


class ProjectedAttention(nn.Module):
    """Multi-head attention around its projections: layout, heads, masks and both products. A subclass computes the projections.

    Attributes:
        embed_dim, num_heads, head_dim, dropout, batch_first, add_zero_attn, bias_k, bias_v: as in :class:`torch.nn.MultiheadAttention`.
        products: slots of the quantizers of scaled query, transposed key, value and softmax.
    """

    products: ClassVar[tuple[str, ...]] = ("query_heads", "key_heads", "value_heads", "softmax")
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    bias_k: Tensor | None
    bias_v: Tensor | None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """The projections (N, length, embed_dim) of the inputs (N, length, width)."""
        raise NotImplementedError

    def _project_out(self, x: Tensor) -> Tensor:
        """The output projection of (N, L, embed_dim)."""
        raise NotImplementedError

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
        if query.is_nested:
            raise QuantizationError(
                f"{type(self).__name__}: got a nested tensor; expected a padded one. Pass a key_padding_mask"
            )
        if is_causal and attn_mask is None:
            raise QuantizationError(
                f"{type(self).__name__}: got is_causal without attn_mask; expected both, the hint and the mask"
            )
        batched = query.dim() == 3
        first = self._batch_first(query, batched)
        second = first if key is query else self._batch_first(key, batched)  # one tensor stays one
        third = second if value is key else self._batch_first(value, batched)
        q, k, v = self._heads(self._project(first, second, third))
        mask = self._mask(attn_mask, key_padding_mask, q)
        products, dropout_p = self._chosen(self.products), self.dropout if self.training else 0.0
        weights = None
        if need_weights or not all(map(is_passive, products)):
            y, weights = attend(products, q, k, v, mask, dropout_p, 1 / math.sqrt(self.head_dim))
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p)
        y = self._project_out(y.transpose(1, 2).flatten(2))
        y = y.squeeze(0) if not batched else y if self.batch_first else y.transpose(0, 1)
        if not need_weights or weights is None:
            return y, None
        weights = weights.mean(1) if average_attn_weights else weights
        return y, weights if batched else weights.squeeze(0)

    def _chosen(self, slots: tuple[str, ...]) -> tuple[nn.Module, ...]:
        return tuple(getattr(self, f"{slot}_quantizer") for slot in slots)

    def _batch_first(self, x: Tensor, batched: bool) -> Tensor:
        return x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)

    def _heads(self, projected: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Query, key and value as (N, heads, length, width), with the extra keys of ``add_bias_kv`` and ``add_zero_attn``."""
        result = []
        for number, (x, extra) in enumerate(
            zip(projected, (None, self.bias_k, self.bias_v), strict=True)
        ):
            if extra is not None:
                x = torch.cat([x, extra.expand(x.shape[0], -1, -1)], dim=1)
            x = x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            result.append(F.pad(x, (0, 0, 0, 1)) if number and self.add_zero_attn else x)
        return tuple(result)

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor
    ) -> Tensor | None:
        """One additive mask that broadcasts with (N, heads, L, S); True and -inf exclude. The extra keys are never masked."""
        masks = []
        if attn_mask is not None:
            per_head = attn_mask.dim() == 3
            masks.append(
                attn_mask.view(-1, self.num_heads, *attn_mask.shape[1:]) if per_head else attn_mask
            )
        if key_padding_mask is not None:
            padded = (
                key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask.unsqueeze(0)
            )
            masks.append(padded[:, None, None, :])
        if not masks:
            return None
        added = [
            additive(mask, mask if mask.dtype is torch.bool else None, query.dtype)
            for mask in masks
        ]
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        return F.pad(sum(added[1:], added[0]), (0, extra))
