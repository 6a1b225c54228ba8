"""Brevitas: layers with proxies ``weight_quant``, ``input_quant``, and quantized activations."""

from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.frontends.checkpoints.found import (
    Grid,
    Layer,
    Layers,
    RefusedError,
    axis_of,
    modules_of,
)

PACKAGE = "brevitas.nn"
#: Of these, quantizing the argument is quantizing the result.
_SAME = {"QuantIdentity", "QuantReLU"}


def read_brevitas(other: nn.Module, model: nn.Module) -> Layers:
    """Return what Brevitas quantizes; its layers have the paths of the float ones."""
    layers: Layers = {}
    for path, module, names in modules_of(other, PACKAGE):
        try:
            layer = _layer(module, names)
        except RefusedError as error:
            layers[path] = str(error)
        else:
            if layer.grids:
                layers[path] = layer
    return layers


def _layer(module: Any, names: set[str]) -> Layer:
    layer = Layer()
    for slot in ("input", "weight", "bias", "output", "act"):
        proxy = getattr(module, f"{slot}_quant", None)
        if proxy is None or not proxy.is_quant_enabled:
            continue
        if slot == "weight":
            with torch.no_grad():
                weight = module.quant_weight()
            layer.grids["weight"] = _grid(proxy, weight.scale, weight.zero_point, weight.bit_width)
            layer.values["weight"] = weight.value.detach()
        elif slot == "input" or (slot == "act" and names & _SAME):
            numbers = (proxy.scale(), proxy.zero_point(), proxy.bit_width())
            layer.grids["input"] = _grid(proxy, *numbers)
        else:
            raise RefusedError(f"{slot}_quant of {min(names)} quantizes another tensor than inputs")
    return layer


def _grid(proxy: Any, scale: Tensor | None, zero_point: Any, bit_width: Any) -> Grid:
    if proxy.is_groupwise:
        raise RefusedError("blocks")
    if scale is None or bit_width is None:
        raise RefusedError("no calibrated scale, or one that each call takes")
    if str(proxy.rounding_mode).upper() != "ROUND":
        raise RefusedError(f"the rounding {proxy.rounding_mode}")
    scale, point = scale.detach(), zero_point.detach()
    descriptor = QuantDescriptor(
        int(bit_width),
        axis=axis_of(scale),
        unsigned=not proxy.is_signed,
        narrow_range=bool(proxy.is_narrow_range),
        symmetric=not bool(point.any()),
    )
    return Grid(descriptor, scale=scale, zero_point=point.expand(scale.shape))
