"""Ready-made configurations, and those of hardware platforms.

Each recipe is a plain :class:`~torchq.QuantConfig`: print it, add rules to it, save it as JSON.
"""

from torchq.recipes.platforms import PLATFORMS, Platform, platform
from torchq.recipes.recipes import (
    RECIPES,
    by_name,
    fp8,
    int4_weight,
    int8,
    int8_dynamic,
    int8_per_tensor,
    integer,
    mxfp8,
    nvfp4,
    w4a4,
)

__all__ = [
    "PLATFORMS",
    "RECIPES",
    "Platform",
    "by_name",
    "fp8",
    "int4_weight",
    "int8",
    "int8_dynamic",
    "int8_per_tensor",
    "integer",
    "mxfp8",
    "nvfp4",
    "platform",
    "w4a4",
]
