"""The check of one fold: a layer and its BatchNorm against the folded layer, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.solve import relative_error
from torchq.fusion.modules import CONVOLUTIONS, TRANSPOSED, norm_remainder, torch_base
from torchq.fusion.quantized import holds_quantizers
from torchq.utils import copy_module

__all__ = ["error_of_fold_after", "error_of_fold_before"]

_WIDE = 16  # a larger window is only shown as far as the padding leaves an output


def error_of_fold_after(
    layer: Any, norm: nn.Module, exact: KernelBias, put_into: Callable[[Any], None] | None
) -> float:
    """Return the relative error of folding ``norm`` into the layer before it.

    Args:
        layer: left unchanged.
        norm: left unchanged.
        exact: the folded kernel and bias, float64.
        put_into: writes the folded numbers into a layer. Where it is given, a copy of the layer
            is changed by it and compared, and ``exact`` is not used.
    """
    x = _sample(layer, torch.Generator().manual_seed(0))
    want = _run([layer, norm], x)
    if put_into is not None:
        changed: Any = copy_module(layer)
        put_into(changed)
        return relative_error(_run([changed, norm_remainder(norm)], x), want)
    folded = _with_bias(layer) if layer.bias is None else layer
    return relative_error(_run([folded, norm_remainder(norm)], x, _as_state(exact)), want)


def error_of_fold_before(norm: nn.Module, layer: Any, exact: KernelBias, pad: Any | None) -> float:
    """Return the relative error of folding ``norm`` into the layer behind it.

    Args:
        norm: left unchanged.
        layer: left unchanged.
        exact: the folded kernel and bias, float64.
        pad: the module that pads in place of the layer, or None.
    """
    x = _sample(layer, torch.Generator().manual_seed(0))
    want = _run([norm, layer], x)
    folded = _with_bias(layer)
    if pad is not None:
        folded.padding = (0,) * len(pad.padding)
        x = pad.double()(x)
    return relative_error(_run([folded], x, _as_state(exact)), want)


def _as_state(value: KernelBias) -> dict[str, Tensor]:
    return {"parts.0.weight": value.kernel, "parts.0.bias": value.bias}


class _Chain(nn.Module):
    """Forwards run one after the other, past hooks, on parameters that functional_call replaces."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            if x.dim() == 2 and isinstance(part, nn.BatchNorm2d):
                x = x[:, :, None, None]  # tokens, with their features moved to axis 1
            elif x.dim() == 2 and isinstance(part, nn.BatchNorm3d):
                x = x[:, :, None, None, None]
            if _calls_children(part):  # of such a layer only torch's own part is compared
                x = torch_base(part).forward(part, x)
            else:
                x = part.forward(x)
        return x


def _calls_children(module: nn.Module) -> bool:
    """Return True for a layer with modules inside, such as detectron2's Conv2d with its norm."""
    return (
        isinstance(module, (*CONVOLUTIONS, nn.Linear))
        and next(module.children(), None) is not None
        and not holds_quantizers(module)
    )


def _run(parts: list[nn.Module], x: Tensor, values: dict[str, Tensor] | None = None) -> Tensor:
    """Return what ``parts`` compute in float64 on the CPU, with some of their tensors replaced."""
    chain = _Chain(*parts)
    state = {**dict(chain.named_parameters()), **dict(chain.named_buffers())}
    double = {name: t.detach().cpu() for name, t in state.items()}
    double = {name: t.double() if t.is_floating_point() else t for name, t in double.items()}
    with torch.no_grad():
        out = functional_call(chain, {**double, **(values or {})}, (x,))
    assert isinstance(out, Tensor)
    return out.flatten(1) if isinstance(parts[0], nn.Linear) else out


def _smallest_input(window: int, padding: int, mode: str) -> int:
    """Return an input size that the layer accepts and that shows its window.

    A wide window (of an atrous layer) is shown only as far as the padding leaves an output.
    """
    if mode != "zeros":
        return max(window, padding + 1)
    return max(window - 2 * padding, min(window, _WIDE))


def _sample(layer: Any, generator: torch.Generator) -> Tensor:
    """Return a random float64 input for ``layer``."""
    if isinstance(layer, nn.Linear):
        return torch.randn(
            4, layer.in_features, dtype=torch.float64, generator=generator, device="cpu"
        )
    pads = layer.padding if isinstance(layer.padding, tuple) else (0,) * len(layer.kernel_size)
    spatial = []
    for axis, (d, k, p) in enumerate(zip(layer.dilation, layer.kernel_size, pads, strict=True)):
        size = _smallest_input(d * (k - 1) + 1, p, layer.padding_mode) + 1 + axis
        spatial.append(3 if isinstance(layer, TRANSPOSED) else size)
    shape = (2, layer.in_channels, *spatial)
    return torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")


def _with_bias(layer: Any) -> Any:
    """Return a copy of ``layer`` that shares its weight and has a bias to replace."""
    twin = copy_module(layer, sharing=[layer.weight])
    twin.register_parameter("bias", nn.Parameter(torch.zeros(1, device="cpu")))
    return twin
