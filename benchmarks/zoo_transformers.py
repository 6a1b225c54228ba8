"""Networks of Hugging Face's transformers: small configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["HUGGING_FACE", "batches", "make"]

LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {**LAYERS, "intermediate_size": 128, "vocab_size": 200}
VISION = {**LAYERS, "intermediate_size": 128, "image_size": 64, "patch_size": 16}
SMALL_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200}

# Architecture -> (configuration, its options, the kind of input).
HUGGING_FACE: dict[str, tuple[str, dict[str, Any], str]] = {
    "BertForSequenceClassification": ("BertConfig", WORDS, "text"),
    "RobertaForSequenceClassification": ("RobertaConfig", WORDS, "text"),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 200},
        "text",
    ),
    "AlbertForSequenceClassification": ("AlbertConfig", {**WORDS, "embedding_size": 32}, "text"),
    "ElectraForSequenceClassification": ("ElectraConfig", WORDS, "text"),
    "GPT2LMHeadModel": ("GPT2Config", SMALL_GPT, "text"),
    "OPTForCausalLM": (
        "OPTConfig",
        {**LAYERS, "ffn_dim": 128, "vocab_size": 200, "word_embed_proj_dim": 64},
        "text",
    ),
    "LlamaForCausalLM": ("LlamaConfig", {**WORDS, "num_key_value_heads": 2}, "text"),
    "Qwen2ForCausalLM": ("Qwen2Config", {**WORDS, "num_key_value_heads": 2}, "text"),
    "T5EncoderModel": (
        "T5Config",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200},
        "text",
    ),
    "MambaForCausalLM": (
        "MambaConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200},
        "text",
    ),
    "ViTForImageClassification": ("ViTConfig", VISION, "image"),
    "DeiTForImageClassification": ("DeiTConfig", VISION, "image"),
    "BeitForImageClassification": (
        "BeitConfig",
        {**VISION, "use_relative_position_bias": True},
        "image",
    ),
    "Dinov2ForImageClassification": ("Dinov2Config", VISION, "image"),
    "SwinForImageClassification": (
        "SwinConfig",
        {
            "image_size": 64,
            "embed_dim": 32,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
    ),
    "SegformerForSemanticSegmentation": ("SegformerConfig", {"depths": [1, 1, 1, 1]}, "image"),
    "ConvNextV2ForImageClassification": (
        "ConvNextV2Config",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 128]},
        "image",
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 128, 256], "embedding_size": 16},
        "image",
    ),
    "MobileViTForImageClassification": ("MobileViTConfig", {"image_size": 64}, "image"),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"image_size": 64}, "image"),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", WORDS, "text"),
    "MobileBertForSequenceClassification": (
        "MobileBertConfig",
        {**WORDS, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
        "text",
    ),
    "SqueezeBertForSequenceClassification": (
        "SqueezeBertConfig",
        {**WORDS, "embedding_size": 64},
        "text",
    ),
    "MPNetForSequenceClassification": ("MPNetConfig", WORDS, "text"),
    "XLNetForSequenceClassification": (
        "XLNetConfig",
        {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128, "vocab_size": 200},
        "text",
    ),
    "LongformerForSequenceClassification": (
        "LongformerConfig",
        {**WORDS, "attention_window": 8},
        "text",
    ),
    "FunnelForSequenceClassification": (
        "FunnelConfig",
        {
            "d_model": 64,
            "n_head": 4,
            "d_head": 16,
            "d_inner": 128,
            "block_sizes": [1, 1],
            "vocab_size": 200,
        },
        "text",
    ),
    "FNetForSequenceClassification": (
        "FNetConfig",
        {**WORDS, "max_position_embeddings": 64, "tpu_short_seq_length": 64},
        "text",
    ),
    "ModernBertForSequenceClassification": (
        "ModernBertConfig",
        {**WORDS, "pad_token_id": 0},
        "text",
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", WORDS, "text"),
    "GPTNeoForCausalLM": (
        "GPTNeoConfig",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "vocab_size": 200,
        },
        "text",
    ),
    "GPTJForCausalLM": ("GPTJConfig", {**SMALL_GPT, "rotary_dim": 8}, "text"),
    "BloomForCausalLM": (
        "BloomConfig",
        {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 200},
        "text",
    ),
    "MistralForCausalLM": ("MistralConfig", {**WORDS, "num_key_value_heads": 2}, "text"),
    "MixtralForCausalLM": (
        "MixtralConfig",
        {**WORDS, "num_key_value_heads": 2, "num_local_experts": 2},
        "text",
    ),
    "Phi3ForCausalLM": (
        "Phi3Config",
        {**WORDS, "num_key_value_heads": 2, "pad_token_id": 0},
        "text",
    ),
    "Qwen3ForCausalLM": (
        "Qwen3Config",
        {**WORDS, "num_key_value_heads": 2, "head_dim": 16},
        "text",
    ),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {**WORDS, "num_key_value_heads": 2, "head_dim": 16},
        "text",
    ),
    "FalconForCausalLM": ("FalconConfig", {**LAYERS, "vocab_size": 200}, "text"),
    "RwkvForCausalLM": (
        "RwkvConfig",
        {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200},
        "text",
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 200},
        "seq2seq",
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "vocab_size": 200,
        },
        "seq2seq",
    ),
    "CLIPVisionModel": ("CLIPVisionConfig", VISION, "image"),
    "SiglipVisionModel": ("SiglipVisionConfig", VISION, "image"),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", VISION, "image"),
    "DINOv3ViTModel": ("DINOv3ViTConfig", VISION, "image"),
    "Swinv2ForImageClassification": (
        "Swinv2Config",
        {
            "image_size": 64,
            "embed_dim": 32,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
        "image",
    ),
    "PvtForImageClassification": ("PvtConfig", {"image_size": 64, "depths": [1, 1, 1, 1]}, "image"),
    "PvtV2ForImageClassification": (
        "PvtV2Config",
        {"image_size": 64, "depths": [1, 1, 1, 1]},
        "image",
    ),
    "LevitForImageClassification": ("LevitConfig", {"image_size": 64}, "image"),
    "PoolFormerForImageClassification": ("PoolFormerConfig", {"depths": [1, 1, 1, 1]}, "image"),
    "RegNetForImageClassification": (
        "RegNetConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [32, 64, 96, 128],
            "groups_width": 16,
            "embedding_size": 16,
        },
        "image",
    ),
    "EfficientNetForImageClassification": (
        "EfficientNetConfig",
        {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.5, "hidden_dim": 640},
        "image",
    ),
    "BitForImageClassification": (
        "BitConfig",
        {
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [32, 64, 128, 256],
            "embedding_size": 32,
            "num_groups": 8,
        },
        "image",
    ),
    "FocalNetForImageClassification": (
        "FocalNetConfig",
        {"image_size": 64, "embed_dim": 32, "depths": [1, 1, 1, 1]},
        "image",
    ),
    "ConvNextForImageClassification": (
        "ConvNextConfig",
        {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 128]},
        "image",
    ),
    "MobileNetV1ForImageClassification": ("MobileNetV1Config", {"image_size": 64}, "image"),
    "MobileViTV2ForImageClassification": ("MobileViTV2Config", {"image_size": 64}, "image"),
    "ViTMAEModel": ("ViTMAEConfig", VISION, "image"),
    "DPTForDepthEstimation": (
        "DPTConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "image_size": 64,
            "patch_size": 16,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [16, 16, 32, 32],
            "fusion_hidden_size": 16,
        },
        "image",
    ),
    "Wav2Vec2ForCTC": (
        "Wav2Vec2Config",
        {
            **LAYERS,
            "intermediate_size": 128,
            "vocab_size": 32,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        "audio",
    ),
    "HubertForCTC": (
        "HubertConfig",
        {
            **LAYERS,
            "intermediate_size": 128,
            "vocab_size": 32,
            "conv_dim": [16, 16],
            "conv_kernel": [10, 3],
            "conv_stride": [5, 2],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
        "audio",
    ),
}


def make(key: str) -> nn.Module:
    """Return the network of an architecture, in eval mode."""
    import transformers

    config, options, _ = HUGGING_FACE[key]
    model: nn.Module = getattr(transformers, key)(getattr(transformers, config)(**options))
    return model.eval()


def batches(key: str) -> list[dict[str, torch.Tensor]]:
    """Return two batches of keyword arguments for an architecture, of different sizes."""
    kind = HUGGING_FACE[key][2]
    if kind == "image":
        return [{"pixel_values": torch.randn(n, 3, 64, 64)} for n in (2, 3)]
    if kind == "audio":
        return [{"input_values": torch.randn(n, 2000)} for n in (2, 3)]
    words = [{"input_ids": torch.randint(3, 200, size)} for size in ((2, 16), (3, 24))]
    if kind == "text":
        return words
    return [{**batch, "decoder_input_ids": batch["input_ids"]} for batch in words]
