"""Networks with random weights that compute as trained ones do."""

from __future__ import annotations

from torch import nn

__all__ = ["vary_constants_"]


def vary_constants_(model: nn.Module) -> None:
    """Give random values to what is 0, 1 or tiny before training, and which runtimes delete."""
    for module in model.modules():
        if type(module).__name__ == "LearnableAffineBlock":  # HGNetV2: 1 and 0.
            nn.init.uniform_(module.scale, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    for name, parameter in model.named_parameters():
        if name.endswith((".gamma", ".layer_scale")):  # ConvNeXt: 1e-6, which codes make 0.
            nn.init.uniform_(parameter, 0.5, 1.5)
        if name == "heads.head.weight":  # torchvision's ViT: 0, as is every result then.
            nn.init.normal_(parameter, std=0.02)
