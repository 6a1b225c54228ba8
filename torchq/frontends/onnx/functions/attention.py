"""Attention as the ONNX operator Attention (opset 23 to 25) defines it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class AttentionOptions:
    """The attributes of the operator; see there.

    ``heads`` and ``kv_heads`` are 0 for tensors of four dimensions, ``scale`` is None for one over
    the root of the size of a head, and windows of -1 have no bound.
    """

    scale: float | None = None
    causal: bool = False
    heads: int = 0
    kv_heads: int = 0
    softcap: float = 0.0
    mode: int = 0
    left: int = -1
    right: int = -1
    precision: torch.dtype | None = None


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return (batch, length, heads * size) as (batch, heads, length, size)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Return (batch, heads, length, size) as (batch, length, heads * size)."""
    return x.transpose(1, 2).flatten(2)


def attention_bias(
    q: Tensor,
    keys: int,
    mask: Tensor | None,
    before: int,
    lengths: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Return what is added to the products of queries and keys: minus infinity for hidden keys.

    Args:
        q: (batch, heads, queries, size).
        keys: how many there are, those of the cache included.
        mask: of flags or of numbers to add; shorter than the keys where the rest is hidden.
        before: keys of the cache that precede the first query.
        lengths: (batch,) keys that are valid, of a cache that is longer; None for all.
        options: causal order and windows.
    """
    queries, hidden = q.shape[2], torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
    bias = torch.zeros((queries, keys), dtype=q.dtype, device=q.device)
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, torch.zeros_like(hidden), hidden)
        if mask.shape[-1] < keys:
            mask = F.pad(mask, (0, keys - mask.shape[-1]), value=-torch.inf)
        bias = bias + mask
    offset = torch.tensor(before, device=q.device)
    if lengths is not None:
        offset = (lengths.reshape(-1, 1, 1, 1) - queries).to(q.device)
    rows = torch.arange(queries, device=q.device).unsqueeze(1) + offset
    ahead = torch.arange(keys, device=q.device) - rows
    limits = [(ahead > 0, options.causal), (-ahead > options.left, options.left >= 0)]
    for beyond, counts in (*limits, (ahead > options.right, options.right >= 0)):
        if counts:
            bias = bias + torch.where(beyond, hidden, torch.zeros_like(hidden))
    if lengths is not None:
        padding = torch.arange(keys, device=q.device) >= lengths.reshape(-1, 1, 1, 1)
        bias = bias + torch.where(padding, hidden, torch.zeros_like(hidden))
    return bias


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    past_key: Tensor | None,
    past_value: Tensor | None,
    lengths: Tensor | None,
    settings: tuple[object, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, the keys and values with those of the cache, and the products.

    Args:
        q: (batch, heads, queries, size), or (batch, queries, heads * size).
        k: likewise; several heads of queries may share one of the keys.
        v: likewise.
        mask: see :func:`attention_bias`.
        past_key: keys that come before, or None.
        past_value: their values.
        lengths: see :func:`attention_bias`.
        settings: the fields of :class:`AttentionOptions`.
    """
    options = AttentionOptions(*settings)  # type: ignore[arg-type]
    flat = q.dim() == 3
    if flat:
        q = split_heads(q, options.heads)
        k, v = (split_heads(x, options.kv_heads) for x in (k, v))
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    repeats = q.shape[1] // k.shape[1]
    all_k, all_v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
    scale = (q.shape[-1] ** -0.5 if options.scale is None else options.scale) ** 0.5
    products = (q * scale) @ (all_k.transpose(-1, -2) * scale)
    shown = products
    if options.softcap > 0:
        products = options.softcap * torch.tanh(products / options.softcap)
    bias = attention_bias(q, k.shape[2], mask, before, lengths, options)
    biased = products + bias
    weights = torch.softmax(biased.to(options.precision or biased.dtype), -1)
    # A query that sees no key gives zeros.
    blind = torch.isneginf(bias.amax(-1, keepdim=True))
    weights = torch.where(blind, torch.zeros_like(weights), weights).to(q.dtype)
    shown = (shown, products, biased, weights)[options.mode]
    y = weights @ all_v
    return (merge_heads(y) if flat else y), k, v, shown
