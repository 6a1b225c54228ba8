"""NVIDIA ModelOpt: layers with children ``input_quantizer``, ``weight_quantizer``, by ranges.

It rounds ``x * (127 / amax)`` where torchq rounds ``x / (amax / 127)``: values next to a tie may go
to the other code. None of 8 quantizers of version 0.47.0 was seen to.
"""

from typing import Any

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.frontends.checkpoints.found import Grid, Layer, Layers, RefusedError, modules_of

PACKAGE = "modelopt.torch.quantization"


def read_modelopt(other: nn.Module, model: nn.Module) -> Layers:
    """Return what ModelOpt quantizes; its layers have the paths of the float ones."""
    layers: Layers = {}
    for path, quantizer, names in modules_of(other, PACKAGE):
        owner, _, child = path.rpartition(".")
        if "TensorQuantizer" not in names:
            if "SequentialQuantizer" in names:
                layers[owner] = f"{child} is a sequence of quantizers"
            continue
        layer = layers.setdefault(owner, Layer())
        if isinstance(layer, str) or not quantizer.is_enabled:
            continue
        try:
            layer.grids[child.removesuffix("_quantizer")] = _grid(quantizer)
        except RefusedError as error:
            layers[owner] = f"{child} has {error}"
    return {path: layer for path, layer in layers.items() if isinstance(layer, str) or layer.grids}


def _grid(q: Any) -> Grid:
    refused = {
        "blocks": q.block_sizes,
        "a bias": q.bias,
        "a rotation": q.rotate_is_enabled,
        "a range that each call takes": getattr(q, "_dynamic", False),
        "codes instead of values": not q.fake_quant,
        "no calibrated range": q.amax is None,
    }
    for what, holds in refused.items():
        if holds:
            raise RefusedError(what)
    axis = q.axis if q.amax.numel() > 1 else None
    signs: dict[str, Any] = {}
    if isinstance(q.num_bits, int):
        signs = {"unsigned": q.unsigned, "narrow_range": q.narrow_range}
    descriptor = QuantDescriptor(q.num_bits, axis=axis, **signs)
    return Grid(descriptor, amax=q.amax.detach(), factor=q.pre_quant_scale)
