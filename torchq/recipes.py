"""Ready-made configurations. Each is a plain :class:`~torchq.QuantConfig`: print it, add rules to it, save it as JSON.

All quantize convolutions, linear layers and the projections of attention; pooling, normalisation and embeddings stay float unless a rule
names them.
"""

from __future__ import annotations

from collections.abc import Callable

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.utils import Registry

__all__ = [
    "RECIPES",
    "by_name",
    "int8",
    "int8_per_tensor",
    "int4_weight",
    "w4a4",
    "fp8",
    "mxfp8",
    "nvfp4",
]

RECIPES: Registry[str, Callable[[], QuantConfig]] = Registry("recipe")

_CONV = "type:torch.nn.modules.conv.Conv[123]d"
_TRANSPOSED = "type:torch.nn.modules.conv.ConvTranspose[123]d"
_LINEAR = "type:torch.nn.modules.linear.Linear"
_BILINEAR = "type:torch.nn.modules.linear.Bilinear"
_ATTENTION = "type:torch.nn.modules.activation.MultiheadAttention"


def _compute_layers(
    name: str, input: QuantDescriptor | None, weight: QuantDescriptor, *, per_channel: bool
) -> QuantConfig:
    """Rules for Conv, ConvTranspose, Linear and MultiheadAttention that differ only in the axis of the weight's output channels."""
    axes = {_CONV: 0, _TRANSPOSED: 1, _LINEAR: 0, _BILINEAR: 0, _ATTENTION: 0}
    rules = [
        Rule(
            pattern,
            input=input,
            weight=weight.replace(axis=axis) if per_channel else weight,
            optional=True,
        )
        for pattern, axis in axes.items()
    ]
    return QuantConfig(tuple(rules), name=name)


@RECIPES.register("int8")
def int8(*, reduce_range: bool = False) -> QuantConfig:
    """INT8 weights per output channel, INT8 activations per tensor: what TensorRT, ONNX Runtime and OpenVINO run fastest.

    Args:
        reduce_range: 7 bits for weights, stored as int8. For x86 CPUs without VNNI or AMX, whose kernels add two products of uint8 and
            int8 in 16 bits: with 8 bits that overflows. Elsewhere it only costs accuracy.
    """
    return _compute_layers(
        "int8", QuantDescriptor(), QuantDescriptor(7 if reduce_range else 8), per_channel=True
    )


@RECIPES.register("int8_per_tensor")
def int8_per_tensor() -> QuantConfig:
    """INT8 weights and activations, one range per tensor."""
    return _compute_layers(
        "int8_per_tensor", QuantDescriptor(), QuantDescriptor(), per_channel=False
    )


@RECIPES.register("w4a4")
def w4a4() -> QuantConfig:
    """INT4 weights per output channel and INT4 activations, both with learned ranges (LSQ): meant for QAT."""
    descriptor = QuantDescriptor(4, learn_amax=True, scale_range_grad=True, calib_method="mse")
    return _compute_layers("w4a4", descriptor, descriptor, per_channel=True)


@RECIPES.register("fp8")
def fp8() -> QuantConfig:
    """FP8 E4M3 weights per output channel and activations per tensor."""
    return _compute_layers(
        "fp8", QuantDescriptor((4, 3)), QuantDescriptor((4, 3)), per_channel=True
    )


@RECIPES.register("int4_weight")
def int4_weight() -> QuantConfig:
    """INT4 weights alone: blocks of 128 inputs in Linear and MultiheadAttention layers, per output channel in convolutions."""
    weight = QuantDescriptor(4, calib_method="max")
    rules = [
        Rule(pattern, weight=weight.replace(axis=axis), optional=True)
        for pattern, axis in ((_CONV, 0), (_TRANSPOSED, 1))
    ]
    blocks = [
        Rule(pattern, weight=weight.replace(block_size=128), optional=True)
        for pattern in (_LINEAR, _BILINEAR, _ATTENTION)
    ]
    return QuantConfig((*rules, *blocks), name="int4_weight")


def _block_scaled(
    name: str, num_bits: tuple[int, int], size: int, scale_format: str
) -> QuantConfig:
    """Blocks along the axis that the layer sums over, for weights and activations, with ranges from each call's data."""

    def on(axis: int) -> QuantDescriptor:
        return QuantDescriptor(
            num_bits, block_size=size, block_axis=axis, scale_format=scale_format, dynamic=True
        )

    # (input axis, weight axis); spatial axes are counted from the front so that 1-3d share the rule.
    axes = {_CONV: (1, 1), _TRANSPOSED: (1, 0)}
    axes |= dict.fromkeys((_LINEAR, _BILINEAR, _ATTENTION), (-1, -1))
    rules = [
        Rule(pattern, input=on(i), weight=on(w), optional=True) for pattern, (i, w) in axes.items()
    ]
    return QuantConfig(tuple(rules), name=name)


@RECIPES.register("mxfp8")
def mxfp8() -> QuantConfig:
    """MXFP8: E4M3 in blocks of 32 with E8M0 scales (OCP Microscaling Formats 1.0). Needs no calibration."""
    return _block_scaled("mxfp8", (4, 3), 32, "e8m0")


@RECIPES.register("nvfp4")
def nvfp4() -> QuantConfig:
    """NVFP4: E2M1 in blocks of 16 with E4M3 scales and one fp32 scale per tensor. Needs no calibration."""
    return _block_scaled("nvfp4", (2, 1), 16, "e4m3")


def by_name(name: str) -> QuantConfig:
    """Return the recipe called ``name``.

    Raises:
        ConfigError: no such recipe; the text lists them.
    """
    return RECIPES[name]()
