"""A small language model with the parts of Llama, trained on Python's own standard library.

RMSNorm, rotary positions, attention with fewer keys than queries, SwiGLU, no biases. Modules have
the names that Hugging Face gives them. Nothing is planted: whatever outliers it has come from
training.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.qat_networks import CODES, Text, kept, read_text
from benchmarks.qat_training import Training, fit

__all__ = [
    "LENGTH",
    "LlamaLike",
    "calibration_pieces",
    "perplexity",
    "trained_language_model",
]

#: Bytes that the model reads at once.
LENGTH = 128
_WIDTH, _HIDDEN, _LAYERS, _HEADS, _KEY_HEADS = 256, 512, 4, 8, 4
_STEPS = 800


class RMSNorm(nn.Module):
    """Divides by the root mean square and multiplies by a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def _rotated(x: Tensor) -> Tensor:
    """Return ``x`` of shape (..., T, D) with rotary positions (Su et al., 2104.09864)."""
    half = x.shape[-1] // 2
    frequency = 10_000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


class Attention(nn.Module):
    """Causal attention; several queries share a key and a value."""

    def __init__(self) -> None:
        super().__init__()
        size = _WIDTH // _HEADS * _KEY_HEADS
        self.q_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.k_proj = nn.Linear(_WIDTH, size, bias=False)
        self.v_proj = nn.Linear(_WIDTH, size, bias=False)
        self.o_proj = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (-1, _WIDTH // _HEADS)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (t.repeat_interleave(_HEADS // _KEY_HEADS, dim=1) for t in (_rotated(k), v))
        out = F.scaled_dot_product_attention(_rotated(q), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2002.05202)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up_proj = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down_proj = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each behind a norm and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(_WIDTH), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(_WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaLike(nn.Module):
    """Bytes to the logits of the next byte.

    Shape:
        (N, T) int64 below :data:`CODES` -> (N, T, CODES).
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(CODES, _WIDTH),
                "layers": nn.Sequential(*(DecoderLayer() for _ in range(_LAYERS))),
                "norm": RMSNorm(_WIDTH),
            }
        )
        self.lm_head = nn.Linear(_WIDTH, CODES, bias=False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.model["layers"](self.model["embed_tokens"](codes))
        return self.lm_head(self.model["norm"](x))


def trained_language_model(folder: Path, steps: int = _STEPS) -> tuple[nn.Module, Text]:
    """Return the model, from its file in ``folder`` or trained now from seed 0, and the text."""
    text = read_text()
    path = folder / f"language_model_{steps}.pt"
    return kept(path, LlamaLike(), lambda: _train(text, steps)), text


def _train(text: Text, steps: int) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaLike()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)

    def loss(generator: torch.Generator) -> Tensor:
        codes = text.batch(generator, size=16, length=LENGTH)
        return F.cross_entropy(model(codes[:, :-1]).transpose(1, 2), codes[:, 1:])

    plan = Training(steps, 3e-3, optimizer="adam", weight_decay=0.01, clip=1.0)
    return fit(model, loss, plan, label="language model")


def calibration_pieces(text: Text, seed: int, count: int) -> list[Tensor]:
    """Return ``count`` batches of 16 pieces of training text that a seed chooses."""
    generator = torch.Generator().manual_seed(seed)
    return [text.batch(generator, size=16, length=LENGTH)[:, :-1] for _ in range(count)]


@torch.no_grad()
def perplexity(model: nn.Module, pieces: Tensor) -> float:
    """Return the perplexity per byte on pieces of text, (N, T + 1)."""
    total = 0.0
    for some in pieces.split(32):
        total += F.cross_entropy(
            model(some[:, :-1]).transpose(1, 2), some[:, 1:], reduction="sum"
        ).item()
    return math.exp(total / pieces[:, 1:].numel())
