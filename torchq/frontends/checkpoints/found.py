"""What a reader finds in the model of another maker."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

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


def classes_of(value: Any, package: str) -> list[type]:
    """Return the classes of an object that a package defines, the nearest first."""
    return [c for c in type(value).__mro__ if f"{c.__module__}.".startswith(f"{package}.")]


def modules_of(other: nn.Module, package: str) -> Iterator[tuple[str, nn.Module, set[str]]]:
    """Yield each module of a package with its path and the names of its classes there."""
    for path, module in other.named_modules():
        if found := classes_of(module, package):
            yield path, module, {cls.__name__ for cls in found}
