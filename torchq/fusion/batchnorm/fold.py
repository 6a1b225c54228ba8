"""One fold: new numbers for the layers, and an edit of the module tree."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import FuseError
from torchq.fusion import schema
from torchq.fusion.batchnorm.check import error_of_fold_after, error_of_fold_before
from torchq.fusion.batchnorm.pairs import Pair
from torchq.fusion.linear_map.kernel_algebra import (
    KernelBias,
    fold_affine_after,
    fold_affine_before,
)
from torchq.fusion.modules import (
    TRANSPOSED,
    is_layer,
    is_norm,
    norm_affine,
    norm_remainder,
    output_channels,
)
from torchq.fusion.quantized import QUANTIZED_FOLD_TOLERANCE, RescalesOutput
from torchq.fusion.report import Fusion, Refusal
from torchq.utils import set_submodule

__all__ = [
    "ConstantPad",
    "FoldEdit",
    "LayerNumbers",
    "fold_from_record",
    "plan_fold",
    "replace_parameter",
]

TOLERANCE = 1e-10  # of one fold, float64, relative to the largest output


class ConstantPad(nn.Module):
    """Padding of each channel with a constant of its own.

    It takes the place of a BatchNorm in front of a zero-padded convolution, and pads with the
    value that this BatchNorm maps to zero.

    Args:
        value: ``(channels,)``.
        padding: the number of cells at both ends of each spatial axis.

    Shape:
        ``(N, channels, *spatial)`` -> the same with ``2 * padding`` more per axis.
    """

    value: Tensor

    def __init__(self, value: Tensor, padding: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` padded."""
        value = self.value.reshape(-1, *[1] * len(self.padding)).to(x.dtype)
        sides = [amount for pad in reversed(self.padding) for amount in (pad, pad)]
        return F.pad(x - value, sides) + value

    def extra_repr(self) -> str:
        """Return the arguments for ``repr``."""
        return f"channels={self.value.numel()}, padding={self.padding}"


@dataclass(frozen=True)
class LayerNumbers:
    """New weight and bias of a layer, in the layer's dtype.

    Attributes:
        weight, bias: what replaces the layer's parameters.
        scale: what the layer's output channels were multiplied by; None if nothing was.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor | None = None

    @classmethod
    def of(cls, value: KernelBias, layer: Any, scale: Tensor | None) -> LayerNumbers:
        """Return ``value`` on the device and in the dtype of ``layer``."""
        weight, bias = (t.to(device=layer.weight.device, dtype=layer.weight.dtype) for t in value)
        return cls(weight, bias, scale)

    @property
    def finite(self) -> bool:
        """True if no number overflowed the layer's dtype."""
        return bool(torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all())

    def put_into(self, layer: Any) -> None:
        """Replace the parameters of ``layer``. Other owners of the old tensors keep them."""
        replace_parameter(layer, "weight", self.weight)
        replace_parameter(layer, "bias", self.bias)
        if self.scale is not None and isinstance(layer, RescalesOutput):
            layer.rescale_output_(self.scale)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put a new parameter of ``value`` in place of an old one.

    Device, memory format, ``requires_grad`` and attributes of the old parameter are kept; where
    there was none, those of the layer's weight are taken.
    """
    old = getattr(layer, name)
    like = layer.get_parameter("weight") if old is None else old
    if old is not None and old.shape == value.shape:
        fresh = torch.empty_like(old, requires_grad=False).copy_(value)
    else:
        fresh = value.detach().to(device=like.device, dtype=like.dtype, copy=True)
    parameter = nn.Parameter(fresh, requires_grad=like.requires_grad)
    if old is not None:
        vars(parameter).update(vars(old))
    layer.register_parameter(name, parameter)


@dataclass(frozen=True)
class FoldEdit:
    """A planned fold, applicable to the model and to copies of it.

    Attributes:
        numbers: path of a layer -> its new numbers.
        norms: all paths of the BatchNorm that disappears.
        pad: what takes its place in front of a padded layer (opt-in), else None.
        fusion: the fold's row in the report; None where a record is replayed.
    """

    numbers: dict[str, LayerNumbers]
    norms: tuple[str, ...]
    pad: ConstantPad | None
    fusion: Fusion | None = None

    def apply(self, model: nn.Module) -> None:
        """Change ``model``, where every path is still what it was when the fold was planned."""
        for path, numbers in self.numbers.items():
            layer: Any = model.get_submodule(path)
            numbers.put_into(layer)
            if self.pad is not None:
                layer.padding = (0,) * len(self.pad.padding)
        for path in self.norms:
            norm = model.get_submodule(path)
            new = norm_remainder(norm) if self.pad is None else copy.deepcopy(self.pad)
            set_submodule(model, path, new)

    def record(self) -> dict[str, Any]:
        """Return the structure of the change, as JSON data."""
        return {
            "kind": "batchnorm",
            "norms": list(self.norms),
            "layers": list(self.numbers),
            "constant_pad": self.pad is not None,
        }


def fold_from_record(model: nn.Module, record: Mapping[str, Any]) -> FoldEdit:
    """Return the fold that :meth:`FoldEdit.record` describes, with the layers' own numbers.

    Args:
        model: left unchanged.
        record: an entry of :func:`torchq.fusion.fusion_record`.

    Raises:
        ConfigError: the entry is damaged.
        FuseError: ``model`` has no such BatchNorm or layer.
    """
    schema.expect_keys(record, "kind", "norms", "layers", "constant_pad")
    norms, layers = schema.texts(record, "norms"), schema.texts(record, "layers")
    found = dict(model.named_modules(remove_duplicate=False))
    for path in norms:
        if not path or not is_norm(found.get(path)):
            raise _misplaced(path, found, "a BatchNorm")
    norm: Any = found[norms[0]]
    numbers: dict[str, LayerNumbers] = {}
    for path in layers:
        layer: Any = found.get(path)
        if not is_layer(layer):
            raise _misplaced(path, found, "a layer")
        weight = layer.weight.detach()
        empty = weight.new_zeros(output_channels(layer))
        numbers[path] = LayerNumbers(weight, empty if layer.bias is None else layer.bias.detach())
    if not schema.flag(record, "constant_pad"):
        return FoldEdit(numbers, norms, None)
    if not isinstance(getattr(layer, "padding", None), tuple):
        raise _misplaced(path, found, "a padded convolution")
    pad = ConstantPad(torch.zeros_like(norm.running_mean), layer.padding)
    return FoldEdit(numbers, norms, pad)


def _misplaced(path: str, found: Mapping[str, nn.Module], expected: str) -> FuseError:
    got = f"a {type(found[path]).__name__}" if path in found else "no such module"
    return FuseError(
        f"apply_fusion_record_: {path or '(root)'}: got {got}; expected {expected}."
        " Build the model as it was before fuse_"
    )


def plan_fold(model: nn.Module, pair: Pair, *, verify: bool) -> FoldEdit | Refusal:
    """Compute and check one fold.

    Args:
        model: left unchanged.
        pair: the BatchNorm and the layers that absorb it.
        verify: compare with the unfused pair on random inputs. A layer or BatchNorm that is not
            of torch.nn is always compared.

    Returns:
        The fold, or why it would not be exact.
    """
    norm = model.get_submodule(pair.norm)
    scale, shift = norm_affine(norm)
    numbers: dict[str, LayerNumbers] = {}
    error, pad = 0.0, None
    for path in pair.layers:
        layer: Any = model.get_submodule(path)
        if pair.pads:
            pad = ConstantPad((-shift / scale).to(layer.weight.device), layer.padding)
        exact = _exact(layer, pair.before, scale, shift)
        numbers[path] = LayerNumbers.of(exact, layer, None if pair.before else scale)
        if not numbers[path].finite:
            return Refusal(pair.norm, f"folding it into {path} overflows {layer.weight.dtype}")
        if verify or not (_is_of_torch(norm) and _is_of_torch(layer)):
            try:
                found = _error(pair, norm, layer, exact, numbers[path], pad)
            except Exception as failure:  # a forward of the user's may want more than one tensor
                reason = f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"
                return Refusal(pair.norm, f"folding it into {path} cannot be checked ({reason})")
            error = max(error, found)
            limit = QUANTIZED_FOLD_TOLERANCE if isinstance(layer, RescalesOutput) else TOLERANCE
            if not found <= limit:
                return Refusal(
                    pair.norm,
                    f"folding it into {path} would be off by {found:.1e} (relative, float64);"
                    f" expected at most {limit:.0e}",
                )
    named = model.named_modules(remove_duplicate=False)
    norms = tuple(name for name, module in named if module is norm)
    kind = "norm before layer" if pair.before else "norm after layer"
    parts = (pair.norm, *pair.layers[1:])
    largest = scale.abs().max().item()
    fusion = Fusion(pair.layers[0], kind, parts, error, pair.found_by, largest)
    return FoldEdit(numbers, norms, pad, fusion)


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def _exact(layer: Any, before: bool, scale: Tensor, shift: Tensor) -> KernelBias:
    """Return kernel and bias of ``layer`` with the affine map folded in, in float64."""
    weight = layer.weight.detach().cpu()
    bias = None if layer.bias is None else layer.bias.detach().cpu()
    groups, transposed = getattr(layer, "groups", 1), isinstance(layer, TRANSPOSED)
    fold = fold_affine_before if before else fold_affine_after
    return fold(weight, bias, scale, shift, groups=groups, transposed=transposed)


def _error(
    pair: Pair,
    norm: nn.Module,
    layer: nn.Module,
    exact: KernelBias,
    numbers: LayerNumbers,
    pad: ConstantPad | None,
) -> float:
    if pair.before:
        return error_of_fold_before(norm, layer, exact, copy.deepcopy(pad))
    put_into = numbers.put_into if isinstance(layer, RescalesOutput) else None
    return error_of_fold_after(layer, norm, exact, put_into)
