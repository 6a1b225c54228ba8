"""Folding a BatchNorm into the layers beside it: new numbers, checked in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.fusion.algebra import KernelBias, fold_affine_after, fold_affine_before
from torchq.fusion.linear_map import relative_error
from torchq.fusion.modules import (
    RescalesOutput,
    calls_children,
    holders_of,
    norm_affine,
    norm_remainder,
    output_quantizer_of,
    torch_base,
    weight_slot,
)
from torchq.fusion.pairs import Pair
from torchq.fusion.report import Fusion, Refusal
from torchq.graph.operators import TRANSPOSED
from torchq.utils import copy_module, set_submodule

TOLERANCE = 1e-10  # of one fold, float64, relative to the largest output
_WIDE = 16  # a larger window is only shown as far as the padding leaves an output


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
    """New parameters of a layer in its dtype."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, value: KernelBias, layer: Any) -> LayerNumbers:
        """Return ``value`` on the device and in the dtype of ``layer``."""
        weight, bias = (
            t.to(device=layer.weight.device, dtype=layer.weight.dtype) for t in value
        )
        return cls(weight, bias)

    @property
    def finite(self) -> bool:
        """True if no number overflowed the layer's dtype."""
        return bool(
            torch.isfinite(self.weight).all() and torch.isfinite(self.bias).all()
        )

    def put_into(self, layer: nn.Module) -> None:
        """Replace the parameters of ``layer``. Other owners of the old tensors keep them."""
        replace_parameter(layer, "weight", self.weight)
        replace_parameter(layer, "bias", self.bias)


@dataclass(frozen=True)
class GridFold:
    """The map that a quantized layer folds into itself, on the grid of its own weight."""

    scale: Tensor
    shift: Tensor

    def put_into(self, layer: Any) -> None:
        """Let ``layer`` compute ``scale * result + shift``. Others keep the tensors they share."""
        layer.fold_output_(self.scale, self.shift)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put a parameter of ``value``, like the old one or else the weight, in place of an old one."""
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
    """A planned fold, or one of a record, without ``fusion``; ``pad`` replaces the BatchNorm."""

    numbers: Mapping[str, LayerNumbers | GridFold]
    norms: tuple[str, ...]
    pad: ConstantPad | None
    fusion: Fusion | None = None

    def apply(self, model: nn.Module) -> None:
        """Change ``model``, where every path is still what it was when the fold was planned."""
        result_quantizer = output_quantizer_of(model.get_submodule(self.norms[0]))
        for path, numbers in self.numbers.items():
            layer: Any = model.get_submodule(path)
            keep_own_quantizer_(model, layer)
            numbers.put_into(layer)
            if self.pad is not None:
                layer.padding = (0,) * len(self.pad.padding)
            if self.pad is None and isinstance(layer, RescalesOutput):
                layer.norm_is_folded_(path, self.norms[0], result_quantizer)
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


def keep_own_quantizer_(model: nn.Module, layer: nn.Module) -> None:
    """Give ``layer`` a copy of its weight's quantizer if another module of ``model`` has it too."""
    slot = weight_slot(layer)
    if slot is None:
        return
    quantizer = layer.get_submodule(slot)
    if holders_of(model, quantizer, layer):
        layer.add_module(slot, copy_module(quantizer))


def plan_fold(model: nn.Module, pair: Pair, *, verify: bool) -> FoldEdit | Refusal:
    """Return one fold, or why it would not be exact; ``verify`` compares classes of torch too."""
    norm = model.get_submodule(pair.norm)
    scale, shift = norm_affine(norm)
    numbers: dict[str, LayerNumbers] = {}
    error, pad = 0.0, None
    for path in pair.layers:
        layer: Any = model.get_submodule(path)
        if pair.pads:
            pad = ConstantPad((-shift / scale).to(layer.weight.device), layer.padding)
        exact = _exact(layer, pair.before, scale, shift)
        numbers[path] = LayerNumbers.of(exact, layer)
        if not numbers[path].finite:
            return Refusal(
                pair.norm, f"folding it into {path} overflows {layer.weight.dtype}"
            )
        if verify or not (is_of_torch(norm) and is_of_torch(layer)):
            try:
                deviation = _error(pair, norm, layer, exact, pad)
            # A forward of the user's may want more than one tensor.
            except Exception as failure:
                return Refusal(pair.norm, cannot_be_checked(path, failure))
            error = max(error, deviation)
            if not deviation <= TOLERANCE:
                return Refusal(
                    pair.norm,
                    f"folding it into {path} would be off by {deviation:.1e} (relative, float64);"
                    f" expected at most {TOLERANCE:.0e}",
                )
    kind = "norm before layer" if pair.before else "norm after layer"
    parts = (pair.norm, *pair.layers[1:])
    largest = scale.abs().max().item()
    fusion = Fusion(pair.layers[0], kind, parts, error, pair.found_by, largest)
    return FoldEdit(numbers, paths_of(model, norm), pad, fusion)


def cannot_be_checked(path: str, failure: Exception) -> str:
    """Return the reason of a refusal for a layer that fails on an input."""
    first_line = str(failure).partition("\n")[0]
    return f"folding it into {path} cannot be checked ({type(failure).__name__}: {first_line})"


def paths_of(model: nn.Module, module: nn.Module) -> tuple[str, ...]:
    """Return every path of ``module`` in ``model``."""
    named = model.named_modules(remove_duplicate=False)
    return tuple(name for name, part in named if part is module)


def is_of_torch(module: nn.Module) -> bool:
    """Return True for a class of torch itself, whose forward is known."""
    return type(module).__module__.startswith("torch.nn.")


def _exact(layer: Any, before: bool, scale: Tensor, shift: Tensor) -> KernelBias:
    """Return kernel and bias of ``layer`` with the affine map folded in, in float64."""
    weight = layer.weight.detach().cpu()
    bias = None if layer.bias is None else layer.bias.detach().cpu()
    groups = getattr(layer, "groups", 1)
    transposed = isinstance(layer, TRANSPOSED)
    fold = fold_affine_before if before else fold_affine_after
    return fold(weight, bias, scale, shift, groups=groups, transposed=transposed)


def _error(
    pair: Pair,
    norm: nn.Module,
    layer: nn.Module,
    exact: KernelBias,
    pad: ConstantPad | None,
) -> float:
    """Return the relative error of a fold."""
    x = sample(layer, torch.Generator().manual_seed(0))
    folded = _double(layer)
    for name, value in zip(("weight", "bias"), exact, strict=True):
        folded.register_parameter(name, nn.Parameter(value, requires_grad=False))
    if not pair.before:
        return relative_error(
            run([folded, norm_remainder(norm)], x), run([layer, norm], x)
        )
    want = run([norm, layer], x)
    if pad is not None:
        folded.padding = (0,) * len(pad.padding)
        x = copy.deepcopy(pad).double()(x)
    return relative_error(run([folded], x), want)


def _double(module: nn.Module) -> Any:
    return copy_module(module).cpu().double()


def run(parts: list[Any], x: Tensor) -> Tensor:
    """Return what ``parts`` compute one after the other, past hooks, in float64 on the CPU."""
    ndims = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
    with torch.no_grad():
        for part in map(_double, parts):
            for kind, ndim in ndims.items():
                # Tokens, with features on axis 1.
                if x.dim() == 2 and isinstance(part, kind):
                    x = x.reshape(*x.shape, *[1] * (ndim - 2))
            # Of a layer that calls children only torch's own part is compared, and of a BatchNorm
            # that quantizes its result what comes before.
            is_base_alone = (
                calls_children(part) or output_quantizer_of(part) is not None
            )
            x = torch_base(part).forward(part, x) if is_base_alone else part.forward(x)
    return x.flatten(1) if isinstance(parts[0], nn.Linear) else x


def sample(layer: Any, generator: torch.Generator) -> Tensor:
    """Return a random float64 input for ``layer``."""
    shape = (
        [4, layer.in_features]
        if isinstance(layer, nn.Linear)
        else [2, layer.in_channels]
    )
    for axis, kernel in enumerate(getattr(layer, "kernel_size", ())):
        p = 0 if isinstance(layer.padding, str) else layer.padding[axis]
        window = layer.dilation[axis] * (kernel - 1) + 1
        # A wide window (of an atrous layer) is shown only as far as the padding leaves an output.
        least = max(window - 2 * p, min(window, _WIDE))
        least = least if layer.padding_mode == "zeros" else max(window, p + 1)
        shape.append(3 if isinstance(layer, TRANSPOSED) else least + 1 + axis)
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
