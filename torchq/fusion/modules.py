"""What fuse knows about modules: linear layers, BatchNorms of all kinds, and when their numbers may be changed."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from torchq.fusion.linear_map import kernel_algebra
from torchq.graph import forward_hook_kind, is_torch_leaf

__all__ = [
    "CONVOLUTIONS",
    "QUANTIZED_FIRST",
    "TRANSPOSED",
    "RescalesOutput",
    "block_obstacle",
    "holds_quantizers",
    "is_fuse_leaf",
    "is_layer",
    "is_norm",
    "layer_obstacle",
    "norm_affine",
    "norm_obstacle",
    "norm_remainder",
    "output_channels",
    "torch_base",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_FROZEN = ("weight", "bias", "running_mean", "running_var")

QUANTIZED_FIRST = "holds quantizers; expected the order fuse_, quantize_, calibrate: restore_ the model, fuse it, then quantize and calibrate again"


@runtime_checkable
class RescalesOutput(Protocol):
    """A layer that quantizes its weight and can have its output channels scaled without changing an integer code.

    The weight's range of output channel ``c`` has to grow by ``|scale[c]|`` together with the weight; a negative scale flips the sign
    of the codes. fuse_ calls ``output_scale_obstacle`` while planning, and ``rescale_output_`` after it has put in the scaled weight.
    """

    def output_scale_obstacle(self, scale: Tensor) -> str | None:
        """Why the codes could not stay the same under ``scale`` (one value per output channel), or None. Changes nothing."""
        ...

    def rescale_output_(self, scale: Tensor) -> None:
        """Multiply the weight's ranges by ``|scale|``, one value per output channel."""
        ...


def is_layer(module: nn.Module | None) -> TypeGuard[Any]:
    """Whether ``module`` is a convolution, a transposed convolution or a linear layer."""
    return isinstance(module, (*CONVOLUTIONS, *TRANSPOSED, nn.Linear))


def is_norm(module: nn.Module | None) -> TypeGuard[Any]:
    """Whether ``module`` is a BatchNorm: torch's own, a subclass, or a frozen one that keeps four buffers (torchvision, detectron2)."""
    if isinstance(module, _NORMS):
        return True
    buffers = () if module is None else dict(module.named_buffers(recurse=False))
    return all(name in buffers for name in _FROZEN)


def holds_quantizers(module: nn.Module) -> bool:
    """Whether ``module`` or a descendant was quantized: it has a child named ``*_quantizer`` that is more than an Identity."""
    return any(
        name.rpartition(".")[2].endswith("_quantizer") and type(child) is not nn.Identity
        for name, child in module.named_modules()
    )


def is_fuse_leaf(module: nn.Module) -> bool:
    """Leaves of fuse's traces: torch's, BatchNorms, and layers, except a layer with children that it calls itself (detectron2's Conv2d)."""
    if (
        is_layer(module)
        and not holds_quantizers(module)
        and next(module.children(), None) is not None
    ):
        return _inherits_forward(module)
    return is_torch_leaf(module) or is_norm(module) or is_layer(module)


def torch_base(module: nn.Module) -> type[nn.Module]:
    """The class of ``torch.nn`` that ``module`` is or derives from."""
    return next(cls for cls in type(module).__mro__ if cls.__module__.startswith("torch.nn."))


def _inherits_forward(module: nn.Module) -> bool:
    return type(module).forward is torch_base(module).forward and "forward" not in vars(module)


def output_channels(layer: nn.Module) -> int:
    """Output channels (or features) of a layer."""
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(channels, int)
    return channels


def _tensor_obstacle(module: nn.Module, names: tuple[str, ...]) -> str | None:
    """Why the tensors of ``module`` cannot be read and replaced as they are."""
    if parametrize.is_parametrized(module):
        return "is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
    own = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    for name in names:
        tensor = getattr(module, name, None)
        if tensor is None:
            continue
        if name not in own:
            return f"computes its {name} (weight_norm, spectral_norm or pruning); remove that first"
        if is_lazy(own[name]):
            return f"has an uninitialized {name}; run the model once first"
        if tensor.is_meta:
            return f"has its {name} on the meta device; load the weights first"
        if not tensor.is_floating_point():
            return f"has a {name} of {tensor.dtype}; expected a floating-point one"
        if not bool(torch.isfinite(tensor).all()):
            return f"has a {name} that is not finite"
    return None


def layer_obstacle(layer: nn.Module) -> str | None:
    """Why the weight of ``layer`` may not be replaced, or None."""
    if holds_quantizers(layer) and not isinstance(layer, RescalesOutput):
        return QUANTIZED_FIRST
    if forward_hook_kind(layer) == "a forward hook":
        return "has a forward hook that observes its output; remove the hook first"
    return _tensor_obstacle(layer, ("weight", "bias"))


def norm_obstacle(norm: nn.Module) -> str | None:
    """Why ``norm`` is not a fixed per-channel map that could be folded, or None."""
    if norm.training and isinstance(norm, _NORMS):
        return "in training mode; call .eval() first"
    if getattr(norm, "running_mean", None) is None or getattr(norm, "running_var", None) is None:
        return "keeps no running statistics (track_running_stats=False)"
    if holds_quantizers(norm):
        return QUANTIZED_FIRST
    if hook := forward_hook_kind(norm):
        return f"has {hook}; remove it first"
    if not _inherits_forward(norm) and isinstance(norm, _NORMS) and not hasattr(norm, "act"):
        return f"is a {type(norm).__name__}, whose forward may do more than BatchNorm"
    drop = getattr(norm, "drop", None)
    if isinstance(drop, nn.Module) and drop.training and type(drop) is not nn.Identity:
        return "drops values in training mode; call .eval() first"
    return _tensor_obstacle(norm, _FROZEN)


def norm_affine(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """``(scale, shift)`` of ``norm`` in eval mode, float64 on the CPU."""
    mean, var, weight, bias = (
        None if (t := getattr(norm, name, None)) is None else t.detach().cpu()
        for name in ("running_mean", "running_var", "weight", "bias")
    )
    assert mean is not None
    assert var is not None
    return kernel_algebra.batch_norm_affine(
        mean, var, weight, bias, float(getattr(norm, "eps", 1e-5))
    )


def norm_remainder(norm: nn.Module) -> nn.Module:
    """What stays where ``norm`` was: the activation of a BatchNormAct2d, else an Identity."""
    act = getattr(norm, "act", None)
    return act if isinstance(act, nn.Module) else nn.Identity().train(norm.training)


def block_obstacle(block: nn.Module, *, quantized: bool = False) -> str | None:
    """Why the branches of ``block`` may not be merged and removed, or None; ``quantized`` allows quantizers in it."""
    if holds_quantizers(block) and not quantized:
        return QUANTIZED_FIRST
    for path, module in block.named_modules():
        where = path or "it"
        if is_norm(module) and module.training and isinstance(module, _NORMS):
            return f"{where} is in training mode; call .eval() first"
        if path and (hook := forward_hook_kind(module)):
            return f"{where} has {hook}; remove it first"
        if (is_layer(module) or is_norm(module)) and (reason := _tensor_obstacle(module, _FROZEN)):
            return f"{where} {reason}"
    return None
