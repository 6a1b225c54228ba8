"""Quantize a ViT and a BERT of transformers, save them, and load them into fresh float models.

python examples/transformers_vit_bert.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    ViTConfig,
    ViTForImageClassification,
)

import torchq

SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}


def vit(layers: int) -> tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]:
    """Return a factory of a small ViT, and a batch for it."""
    config = ViTConfig(num_hidden_layers=layers, image_size=64, patch_size=16, **SIZE)
    batch = {"pixel_values": torch.rand(2, 3, 64, 64)}
    return lambda: ViTForImageClassification(config).eval(), batch


def bert(layers: int) -> tuple[Callable[[], nn.Module], dict[str, torch.Tensor]]:
    """Return a factory of a small BERT, and a batch for it."""
    config = BertConfig(num_hidden_layers=layers, vocab_size=1000, **SIZE)
    tokens = torch.randint(0, 1000, (2, 16))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return lambda: BertForSequenceClassification(config).eval(), batch


@torch.no_grad()
def quantize(factory: Callable[[], nn.Module], batch: dict[str, torch.Tensor]) -> None:
    model = factory()
    expected = model(**batch).logits
    options = {"target": "onnxruntime", "example": batch}
    report = torchq.quantize_(model, exclude=["classifier"], **options)
    print(type(model).__name__, str(report).splitlines()[-1])
    torchq.calibrate(model, [batch], progress=False)
    error = model(**batch).logits - expected
    print(
        f"  signal to noise: {20 * torch.log10(expected.norm() / error.norm()):.0f} dB"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torchq.save(model, path)
        loaded = torchq.load_model(factory, path).eval()
    same = torch.equal(loaded(**batch).logits, model(**batch).logits)
    print(f"  saved and loaded: {'equal' if same else 'different'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    for family in (vit, bert):
        torch.manual_seed(0)
        quantize(*family(options.layers))


if __name__ == "__main__":
    main()
