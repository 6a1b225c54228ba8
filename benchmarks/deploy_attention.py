"""Time the parts of a transformer that ``torchq.deploy`` keeps in floating point.

Attention in float32 and in both forms of bfloat16 that ``deploy`` chooses from, each from float32
heads to float32 heads; softmax and LayerNorm in float32 and in bfloat16, without and with the
changes of dtype that a model in float32 needs around them. The baseline is torch in float32. The
processor's time counts, with one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.lowering.modules.bfloat16_attention import attend_in_bfloat16

__all__ = ["main"]

#: Images, tokens, heads, width of a head: the encoder of deploy_native, ViT-B/16, the windows of
#: Swin-T's first stage, and a longer sequence.
ATTENTIONS = ((1, 196, 6, 64), (1, 197, 12, 64), (64, 49, 3, 32), (1, 1024, 8, 64))
#: Tokens and width.
NORMS = ((196, 384), (197, 768))
HALF = torch.bfloat16
Calls = dict[str, Callable[[], object]]


def attention(images: int, tokens: int, heads: int, width: int) -> Calls:
    """Return the forms of attention for heads that one projection computed side by side."""
    joined = torch.randn(images, tokens, 3, heads, width)
    q, k, v = joined.permute(2, 0, 3, 1, 4)
    return {
        "float32": lambda: F.scaled_dot_product_attention(q, k, v),
        "bfloat16, products": lambda: attend_in_bfloat16(q, k, v),
        "bfloat16, torch's attention": lambda: attend_in_bfloat16(q, k, v, flash=True),
    }


def softmax(images: int, tokens: int, heads: int, _: int) -> Calls:
    """Return the softmax of the scores of an attention."""
    scores = torch.randn(images, heads, tokens, tokens)
    half = scores.to(HALF)
    return {
        "float32": lambda: scores.softmax(-1),
        "bfloat16": lambda: half.softmax(-1),
        "bfloat16, from and to float32": lambda: scores.to(HALF).softmax(-1).float(),
    }


def layer_norm(tokens: int, width: int) -> Calls:
    """Return LayerNorm."""
    x, norm = torch.randn(1, tokens, width), torch.nn.LayerNorm(width)
    half, half_norm = x.to(HALF), torch.nn.LayerNorm(width).to(HALF)
    return {
        "float32": lambda: norm(x),
        "bfloat16": lambda: half_norm(half),
        "bfloat16, from and to float32": lambda: half_norm(x.to(HALF)).float(),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Time every part for every size."""
    options = parse(parser(__doc__), argv)
    cases = [("attention", attention, size) for size in ATTENTIONS]
    cases += [("softmax", softmax, size) for size in ATTENTIONS]
    cases += [("layer norm", layer_norm, size) for size in NORMS]
    with Reporter("deploy_attention", options.out) as report, torch.no_grad():
        for part, calls, size in cases:
            torch.manual_seed(0)
            rows = compare(
                calls(*size), baseline="float32", clock=time.process_time, **timing(options)
            )
            for row in rows:
                report.timing(row, part=part, size=list(size), speedup=1 / row.ratio)


if __name__ == "__main__":
    main()
