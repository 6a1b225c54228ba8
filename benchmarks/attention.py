"""Which part of the work of transformers is on integers, with their attention in modules?

Five networks of transformers with random weights, in the sizes of the smallest ones that are
published, but with two layers. ``share`` is the part of the multiply-adds that a plan counts as
quantized: for the model as it is, whose attention is computed outside of its layers, and after
``torchq.hugging_face.attend_in_modules_``. Rows that ``--out`` has already are left out.

Example:
    python -m benchmarks.attention --out benchmarks/results/attention.jsonl
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.harness import Reporter, finished_rows, parse, parser

TARGETS = ("onnxruntime", "openvino", "tensorrt", "executorch")
#: What is planned: the model as it is, and with attention in modules.
VERSIONS = ("outside", "in modules")
_KEY = ("network", "target", "version")
Batch = dict[str, Tensor]


def _bert(tool: Any) -> tuple[nn.Module, Batch]:
    """Return a MiniLM on sentences of 128 tokens."""
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 2}
    words = torch.arange(256).reshape(2, 128)
    return tool.BertModel(tool.BertConfig(**sizes)), {"input_ids": words}


def _vit(tool: Any) -> tuple[nn.Module, Batch]:
    return tool.ViTModel(tool.ViTConfig(num_hidden_layers=2)), _images()


def _dinov2(tool: Any) -> tuple[nn.Module, Batch]:
    config = tool.Dinov2Config(
        hidden_size=384,
        num_attention_heads=6,
        num_hidden_layers=2,
        patch_size=14,
        image_size=224,
    )
    return tool.Dinov2Model(config), _images()


def _whisper(tool: Any) -> tuple[nn.Module, Batch]:
    config = tool.WhisperConfig(encoder_layers=2, decoder_layers=1)
    sound = torch.rand(1, config.num_mel_bins, 2 * config.max_source_positions)
    return tool.WhisperModel(config).encoder, {"input_features": sound}


def _segformer(tool: Any) -> tuple[nn.Module, Batch]:
    return tool.SegformerForSemanticSegmentation(tool.SegformerConfig()), _images()


def _images() -> Batch:
    return {"pixel_values": torch.rand(1, 3, 224, 224)}


NETWORKS: dict[str, Callable[[Any], tuple[nn.Module, Batch]]] = {
    "BERT": _bert,
    "ViT": _vit,
    "DINOv2": _dinov2,
    "Whisper encoder": _whisper,
    "SegFormer": _segformer,
}


def share(model: nn.Module, target: str, batch: Batch) -> float:
    """Return the part of the multiply-adds that a plan quantizes, in percent."""
    planned = torchq.plan(model, target=target, example=batch).share
    return round(100 * planned.quantized, 1) if planned is not None else 0.0


def main(argv: Sequence[str] | None = None) -> None:
    """Plan what has no row yet."""
    options = parse(parser(__doc__), argv)
    warnings.simplefilter("ignore")
    done = finished_rows(options.out, *_KEY)
    tool = importlib.import_module("transformers")
    with Reporter("attention", options.out, packages=("transformers",)) as reporter:
        for name, build in NETWORKS.items():
            torch.manual_seed(0)
            model, batch = build(tool)
            for version in VERSIONS:
                if version == "in modules":
                    torchq.hugging_face.attend_in_modules_(model.eval(), batch)
                for target in TARGETS:
                    row = (name, target, version)
                    if row not in done:
                        case = dict(zip(_KEY, row, strict=True))
                        reporter.value(**case, share=share(model.eval(), target, batch))


if __name__ == "__main__":
    main()
