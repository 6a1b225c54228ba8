"""Planning and carrying out one fold: new numbers, a check in float64, and the edit of the module tree."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from torchq.fusion.batchnorm.pairs import Pair
from torchq.fusion.channel_ranges import spread_of
from torchq.fusion.linear_map import kernel_algebra
from torchq.fusion.linear_map.solve import relative_error
from torchq.fusion.modules import (
    CONVOLUTIONS,
    TRANSPOSED,
    RescalesOutput,
    holds_quantizers,
    norm_affine,
    norm_remainder,
    torch_base,
)
from torchq.fusion.report import Fusion, Refusal
from torchq.utils import set_submodule

__all__ = ["ConstantPad", "FoldEdit", "LayerNumbers", "plan_fold", "replace_parameter"]

TOLERANCE = 1e-10
# A quantized layer may round differently where a weight lies on a tie: one code of the smallest range that is worth quantizing.
QUANTIZED_TOLERANCE = 2e-2


class ConstantPad(nn.Module):
    """Pads each channel with its own constant: where a BatchNorm was in front of a padded convolution, with its zero point.

    Args:
        value: ``(channels,)``.
        padding: cells at both ends of each spatial axis.

    Shape:
        ``(N, channels, *spatial)`` -> the same with ``2 * padding`` more per axis.
    """

    value: Tensor

    def __init__(self, value: Tensor, padding: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        centre = x - self.value.reshape(-1, *[1] * len(self.padding)).to(x.dtype)
        sides = [amount for pad in reversed(self.padding) for amount in (pad, pad)]
        return F.pad(centre, sides) + self.value.reshape(-1, *[1] * len(self.padding)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"channels={self.value.numel()}, padding={self.padding}"


@dataclass(frozen=True)
class LayerNumbers:
    """New weight and bias of a layer, in the layer's dtype; ``scale`` is what its output was scaled by, where it was."""

    weight: Tensor
    bias: Tensor
    scale: Tensor | None = None

    def put_into(self, layer: Any) -> None:
        """Replace the parameters of ``layer``. The old tensors are not touched: others may share them."""
        replace_parameter(layer, "weight", self.weight)
        replace_parameter(layer, "bias", self.bias)
        if self.scale is not None and isinstance(layer, RescalesOutput):
            layer.rescale_output_(self.scale)


def replace_parameter(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put ``value`` in place of a parameter; device, memory format, ``requires_grad`` and attributes of the old one are kept."""
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
        fusion: its row in the report.
    """

    numbers: dict[str, LayerNumbers]
    norms: tuple[str, ...]
    pad: ConstantPad | None
    fusion: Fusion

    def apply(self, model: nn.Module) -> None:
        """Change ``model``, in which every path still is what it was when the fold was planned."""
        for path, numbers in self.numbers.items():
            layer: Any = model.get_submodule(path)
            numbers.put_into(layer)
            if self.pad is not None:
                layer.padding = (0,) * len(self.pad.padding)
        for path in self.norms:
            set_submodule(
                model,
                path,
                norm_remainder(model.get_submodule(path))
                if self.pad is None
                else copy.deepcopy(self.pad),
            )


def _cast(
    value: kernel_algebra.KernelBias, layer: Any, scale: Tensor | None = None
) -> LayerNumbers:
    weight, bias = (t.to(device=layer.weight.device, dtype=layer.weight.dtype) for t in value)
    return LayerNumbers(weight, bias, scale)


class _Chain(nn.Module):
    """Runs forwards one after the other, past hooks, on parameters that functional_call may replace."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if x.dim() == 2 and isinstance(
                part, (nn.BatchNorm2d, nn.BatchNorm3d)
            ):  # tokens, with their features moved to axis 1
                x = x.reshape(*x.shape, *[1] * (2 if isinstance(part, nn.BatchNorm2d) else 3))
            # A layer that calls children of its own (detectron2's Conv2d with its norm inside) is run as torch's layer alone.
            x = torch_base(part).forward(part, x) if _wraps(part) else part.forward(x)
        return x


def _wraps(module: nn.Module) -> bool:
    return (
        isinstance(module, (*CONVOLUTIONS, nn.Linear))
        and next(module.children(), None) is not None
        and not holds_quantizers(module)
    )


def _run(parts: list[nn.Module], x: Tensor, values: dict[str, Tensor] | None = None) -> Tensor:
    chain = _Chain(*parts)
    state = {**dict(chain.named_parameters()), **dict(chain.named_buffers())}
    double = {
        name: t.detach().cpu().double() if t.is_floating_point() else t.detach().cpu()
        for name, t in state.items()
    }
    with torch.no_grad():
        out = functional_call(chain, {**double, **(values or {})}, (x,))
    return out.flatten(1) if isinstance(parts[0], nn.Linear) else out


def _reach(window: int, padding: int, mode: str) -> int:
    """An input size that the layer accepts and that shows its window; a wide one (atrous layers) only as far as padding leaves it to."""
    if mode != "zeros":
        return max(window, padding + 1)
    return max(window - 2 * padding, min(window, 16))


def _sample(layer: Any, generator: torch.Generator) -> Tensor:
    if isinstance(layer, nn.Linear):
        shape = [4, layer.in_features]
    else:
        pads = layer.padding if isinstance(layer.padding, tuple) else (0,) * len(layer.kernel_size)
        reach = [
            _reach(d * (k - 1) + 1, p, layer.padding_mode)
            for d, k, p in zip(layer.dilation, layer.kernel_size, pads, strict=True)
        ]
        shape = [
            2,
            layer.in_channels,
            *(
                3 if isinstance(layer, TRANSPOSED) else size + 1 + axis
                for axis, size in enumerate(reach)
            ),
        ]
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _after_error(
    layer: Any, norm: nn.Module, exact: kernel_algebra.KernelBias, numbers: LayerNumbers
) -> float:
    x = _sample(layer, torch.Generator().manual_seed(0))
    want = _run([layer, norm], x)
    if isinstance(layer, RescalesOutput):
        trial: Any = copy.deepcopy(layer)
        numbers.put_into(trial)
        return relative_error(_run([trial, norm_remainder(norm)], x), want)
    given = {"parts.0.weight": exact.kernel, "parts.0.bias": exact.bias}
    if layer.bias is None:
        layer = _with_bias(layer)
    return relative_error(_run([layer, norm_remainder(norm)], x, given), want)


def _with_bias(layer: Any) -> Any:
    """A stand-in that has a bias to replace; shares the weight."""
    twin = copy.deepcopy(layer, {id(layer.weight): layer.weight})
    twin.register_parameter("bias", nn.Parameter(torch.zeros(1)))
    return twin


def _before_error(
    layer: Any, norm: nn.Module, exact: kernel_algebra.KernelBias, pad: ConstantPad | None
) -> float:
    x = _sample(layer, torch.Generator().manual_seed(0))
    want = _run([norm, layer], x)
    twin = _with_bias(layer)
    given = {"parts.0.weight": exact.kernel, "parts.0.bias": exact.bias}
    if pad is not None:
        twin.padding = (0,) * len(pad.padding)
        x = pad.double()(x)
    return relative_error(_run([twin], x, given), want)


def plan_fold(model: nn.Module, pair: Pair, *, verify: bool) -> FoldEdit | Refusal:
    """Compute and check one fold; ``model`` is not changed.

    Args:
        verify: compare with the unfused pair on random inputs. A layer or BatchNorm with a forward of its own is always compared.
    """
    norm = model.get_submodule(pair.norm)
    scale, shift = norm_affine(norm)
    numbers: dict[str, LayerNumbers] = {}
    error, spreads = 0.0, (0.0, 0.0)
    pad = None
    for path in pair.layers:
        layer: Any = model.get_submodule(path)
        weight, bias = (
            layer.weight.detach().cpu(),
            None if layer.bias is None else layer.bias.detach().cpu(),
        )
        groups, transposed = getattr(layer, "groups", 1), isinstance(layer, TRANSPOSED)
        if pair.pads:
            pad = ConstantPad((-shift / scale).to(layer.weight.device), layer.padding)
        fold = (
            kernel_algebra.fold_affine_before if pair.before else kernel_algebra.fold_affine_after
        )
        exact = fold(weight, bias, scale, shift, groups=groups, transposed=transposed)
        numbers[path] = _cast(exact, layer, None if pair.before else scale)
        if not (
            torch.isfinite(numbers[path].weight).all() and torch.isfinite(numbers[path].bias).all()
        ):
            return Refusal(pair.norm, f"folding it into {path} overflows {layer.weight.dtype}")
        if (
            verify
            or not type(norm).__module__.startswith("torch.nn.")
            or not type(layer).__module__.startswith("torch.nn.")
        ):
            found = (
                _before_error(layer, norm, exact, copy.deepcopy(pad))
                if pair.before
                else _after_error(layer, norm, exact, numbers[path])
            )
            error = max(error, found)
            limit = QUANTIZED_TOLERANCE if isinstance(layer, RescalesOutput) else TOLERANCE
            if not found <= limit:
                return Refusal(
                    pair.norm,
                    f"folding it into {path} would be off by {found:.1e} (relative, float64); expected at most {limit:.0e}",
                )
        spreads = max(
            spreads,
            (spread_of(layer, weight), spread_of(layer, exact.kernel)),
            key=lambda pair: pair[1],
        )
    names = tuple(
        name for name, module in model.named_modules(remove_duplicate=False) if module is norm
    )
    kind = "norm before layer" if pair.before else "norm after layer"
    fusion = Fusion(
        pair.layers[0],
        kind,
        (pair.norm, *pair.layers[1:]),
        error,
        pair.found_by,
        scale.abs().max().item(),
        *spreads,
    )
    return FoldEdit(numbers, names, pad, fusion)
