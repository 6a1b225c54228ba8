"""What a reader finds in the model of another maker, and the readers of models made of layers."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor


class RefusedError(Exception):
    """A layer is quantized in a way that torchq's quantizers do not have; the text says which."""


@dataclass(frozen=True, eq=False)
class Grid:
    """How a maker quantizes one tensor: by a range, or by a scale with a zero point.

    Attributes:
        descriptor: the format and the granularity.
        amax: the range, of makers that keep ranges.
        scale: of any shape with the right number of elements.
        zero_point: whole numbers of the shape of ``scale``; None is 0.
        factor: multiplies the tensor first; see ``TensorQuantizer.pre_quant_scale``.
    """

    descriptor: QuantDescriptor
    amax: Tensor | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    factor: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        """Return True for a grid of the same numbers."""
        if not isinstance(other, Grid):
            return NotImplemented
        pairs = [(getattr(self, name), getattr(other, name)) for name in _NUMBERS]
        return self.descriptor == other.descriptor and all(
            are_equal(a, b) for a, b in pairs
        )

    @property
    def numbers(self) -> Hashable:
        """The numbers of the grid as a key: equal for equal grids."""
        held = (getattr(self, name) for name in _NUMBERS)
        texts = ("" if tensor is None else repr(tensor.tolist()) for tensor in held)
        return self.descriptor, *texts


_NUMBERS = ("amax", "scale", "zero_point", "factor")


def are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Return True for tensors of the same numbers, and for two that are missing."""
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


@dataclass
class Layer:
    """What a maker quantizes of one module.

    Attributes:
        grids: the quantized tensors by slot: "input", "weight", or another slot of the module.
        values: parameters as the maker computes with them: codes times scale.
    """

    grids: dict[str, Grid] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)


#: A layer, or why it is refused, by the path of the module.
Layers = dict[str, "Layer | str"]


def axis_of(scale: Tensor) -> int | None:
    """Return the axis along which scales of the dimensions of a tensor differ; None for one."""
    axes = [d for d, size in enumerate(scale.shape) if size > 1]
    if len(axes) > 1:
        raise RefusedError("scales along several dimensions")
    return axes[0] if axes else None


def modules_of(
    other: nn.Module, package: str
) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Yield each module of a package with its path and the names of its classes there."""
    for path, module in other.named_modules():
        package_classes = [
            c
            for c in type(module).__mro__
            if f"{c.__module__}.".startswith(f"{package}.")
        ]
        if package_classes:
            yield path, module, {cls.__name__ for cls in package_classes}


# --- NVIDIA ModelOpt: layers with children ``input_quantizer``, ``weight_quantizer``, by ranges ---
# It rounds ``x * (127 / amax)`` where torchq rounds ``x / (amax / 127)``: values next to a tie may
# go to the other code. None of 8 quantizers of version 0.47.0 was seen to.

MODELOPT = "modelopt.torch.quantization"


def read_modelopt(other: nn.Module, model: nn.Module) -> Layers:
    """Return what ModelOpt quantizes; its layers have the paths of the float ones."""
    layers: Layers = {}
    for path, quantizer, names in modules_of(other, MODELOPT):
        owner, _, child = path.rpartition(".")
        if "TensorQuantizer" not in names:
            if "SequentialQuantizer" in names:
                layers[owner] = f"{child} is a sequence of quantizers"
            continue
        layer = layers.setdefault(owner, Layer())
        if isinstance(layer, str) or not quantizer.is_enabled:
            continue
        try:
            layer.grids[child.removesuffix("_quantizer")] = _modelopt_grid(quantizer)
        except RefusedError as error:
            layers[owner] = f"{child} has {error}"
    return {
        path: layer
        for path, layer in layers.items()
        if isinstance(layer, str) or layer.grids
    }


def _modelopt_grid(q: Any) -> Grid:
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


# --- Brevitas: layers with proxies ``weight_quant``, ``input_quant``, and quantized activations ---

BREVITAS = "brevitas.nn"
#: Of these, quantizing the argument is quantizing the result.
_SAME = {"QuantIdentity", "QuantReLU"}


def read_brevitas(other: nn.Module, model: nn.Module) -> Layers:
    """Return what Brevitas quantizes; its layers have the paths of the float ones."""
    layers: Layers = {}
    for path, module, names in modules_of(other, BREVITAS):
        try:
            layer = _brevitas_layer(module, names)
        except RefusedError as error:
            layers[path] = str(error)
        else:
            if layer.grids:
                layers[path] = layer
    return layers


def _brevitas_layer(module: Any, names: set[str]) -> Layer:
    layer = Layer()
    for slot in ("input", "weight", "bias", "output", "act"):
        proxy = getattr(module, f"{slot}_quant", None)
        if proxy is None or not proxy.is_quant_enabled:
            continue
        if slot == "weight":
            with torch.no_grad():
                weight = module.quant_weight()
            layer.grids["weight"] = _brevitas_grid(
                proxy, weight.scale, weight.zero_point, weight.bit_width
            )
            layer.values["weight"] = weight.value.detach()
        elif slot == "input" or (slot == "act" and names & _SAME):
            numbers = (proxy.scale(), proxy.zero_point(), proxy.bit_width())
            layer.grids["input"] = _brevitas_grid(proxy, *numbers)
        else:
            raise RefusedError(
                f"{slot}_quant of {min(names)} quantizes another tensor than inputs"
            )
    return layer


def _brevitas_grid(
    proxy: Any, scale: Tensor | None, zero_point: Any, bit_width: Any
) -> Grid:
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


# --- Hugging Face quanto: layers whose weight is a tensor of codes -----------------------------

QUANTO = "optimum.quanto.nn"
_BITS: dict[str, int | tuple[int, int]] = {
    "qint8": 8,
    "qfloat8_e4m3fn": (4, 3),
    "qfloat8_e5m2": (5, 2),
}


def read_quanto(other: nn.Module, model: nn.Module) -> Layers:
    """Return what quanto quantizes; its layers have the paths of the float ones."""
    return {
        path: layer
        for path, m, _ in modules_of(other, QUANTO)
        if (layer := _quanto_layer(m))
    }


def _quanto_layer(module: nn.Module) -> Layer | str:
    if module.activation_qtype is not None:
        return "activations as tensors of codes"
    weight = module.qweight
    if weight is None:
        return ""
    bits = _BITS.get(weight.qtype.name)
    if bits is None:
        return f"weights of type {weight.qtype.name}, in blocks"
    scale = vars(weight)["_scale"].detach()
    # A channel of zeros has the scale 0, and zeros on every grid.
    scale = torch.where(scale == 0, 1.0, scale)
    grid = Grid(QuantDescriptor(bits, axis=axis_of(scale)), scale=scale)
    return Layer({"weight": grid}, {"weight": weight.dequantize().detach()})
