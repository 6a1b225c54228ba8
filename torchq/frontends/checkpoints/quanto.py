"""Hugging Face quanto: layers whose weight is a tensor of codes."""

from typing import Any

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.frontends.checkpoints.found import Grid, Layer, Layers, axis_of, modules_of

PACKAGE = "optimum.quanto.nn"
_BITS: dict[str, int | tuple[int, int]] = {
    "qint8": 8,
    "qfloat8_e4m3fn": (4, 3),
    "qfloat8_e5m2": (5, 2),
}


def read_quanto(other: nn.Module, model: nn.Module) -> Layers:
    """Return what quanto quantizes; its layers have the paths of the float ones."""
    return {path: layer for path, m, _ in modules_of(other, PACKAGE) if (layer := _layer(m))}


def _layer(module: Any) -> Layer | str:
    if module.activation_qtype is not None:
        return "activations as tensors of codes"
    weight = module.qweight
    if weight is None:
        return ""
    bits = _BITS.get(weight.qtype.name)
    if bits is None:
        return f"weights of type {weight.qtype.name}, in blocks"
    scale = vars(weight)["_scale"].detach()
    grid = Grid(QuantDescriptor(bits, axis=axis_of(scale)), scale=scale)
    return Layer({"weight": grid}, {"weight": weight.dequantize().detach()})
