"""Start training where post-training quantization ended.

Algorithms such as :func:`torchq.ptq.gptq_` work best on a fused model, and training works best
with the BatchNorms and branches that fusing removes. So the numbers of the fused model are brought
back into the model that still has them: fusing, backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.fusion import Branches, norm_affine
from torchq.fusion.batchnorm.flow import find_flow
from torchq.fusion.batchnorm.pairs import find_pairs
from torchq.fusion.linear_map.kernel_algebra import fold_affine_after
from torchq.nn import QuantModule, TensorQuantizer
from torchq.qat.distill import float_twin
from torchq.utils import copy_module
from torchq.workflow import quantizers

__all__ = ["start_from_"]

#: The error of a weight that is brought back, relative to the largest; float32 rounding is less.
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class _Change:
    """New values of one parameter or buffer."""

    tensor: Tensor
    value: Tensor


@torch.no_grad()
def start_from_(model: nn.Module, quantized: nn.Module, *, example: Any = None) -> tuple[str, ...]:
    """Give ``model`` the weights, biases and ranges of a quantized twin that is fused, in place.

    In eval mode ``model`` then computes what ``quantized`` computes. Parameters stay the same
    objects. A channel that its BatchNorm multiplies by a negative number gets the other sign in
    both, since codes reach further below 0 than above. While BatchNorms train they take the
    statistics of the batch; :func:`torchq.qat.freeze_bn_` lets training start from exactly this
    model.

    Args:
        model: prepared for training, with BatchNorms or branches that ``quantized`` has no more;
            see :func:`torchq.qat.prepare`.
        quantized: the same network, fused, quantized by the same rules and calibrated; its weights
            may have been changed, by :func:`torchq.ptq.gptq_` say. It is left unchanged.
        example: one input for models that torch.fx cannot trace; as for :func:`torchq.fuse_`.

    Returns:
        The paths of the layers that have new weights.

    Raises:
        ConfigError: the two models do not belong together (the text says where). ``model`` is
            unchanged then.

    Example:
        >>> import copy
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
        >>> twin, batches = copy.deepcopy(model), [torch.randn(4, 3, 8, 8)]
        >>> recipe = torchq.recipes.w4a4(first_last=None)
        >>> _ = torchq.fuse_(twin), torchq.quantize_(twin, recipe)
        >>> _ = torchq.calibrate(twin, batches, progress=False)
        >>> _ = torchq.ptq.gptq_(twin, batches, progress=False)
        >>> _ = torchq.qat.prepare(model, batches, recipe, progress=False)
        >>> torchq.qat.start_from_(model, twin)
        ('0',)
        >>> torch.allclose(model(batches[0]), twin(batches[0]), atol=1e-5)
        True
    """
    ranges = _matching_ranges(model, quantized)
    norms, refusals = _norms_behind(model, example)
    changes: list[_Change] = []
    rescaled: list[tuple[Any, Tensor]] = []
    paths = []
    for path, layer in model.named_modules():
        if not isinstance(layer, QuantModule) or not layer.weight_slots:
            continue
        twin = quantized.get_submodule(path)
        if isinstance(layer, Branches):
            changes += _into_branches(path, layer, twin)
        elif path in norms:
            scale, found = _before_norm(path, layer, norms[path], twin)
            changes += found
            rescaled.append((layer, 1 / scale))
        else:
            changes += _same_parameters(path, layer, twin, refusals)
        paths.append(path)
    for change in changes:
        change.tensor.copy_(change.value)
    for quantizer, ends in ranges:
        quantizer.set_ends(ends)
    for layer, factor in rescaled:
        layer.rescale_output_(factor)
    return tuple(paths)


def _matching_ranges(
    model: nn.Module, quantized: nn.Module
) -> list[tuple[TensorQuantizer, tuple[Tensor, ...]]]:
    """Return each quantizer with the range of its twin."""
    own, others = quantizers(model), quantizers(quantized)
    different = sorted(own.keys() ^ others.keys())
    different += [
        path
        for path in own.keys() & others.keys()
        if _grid(own[path]) != _grid(others[path]) or not others[path].calibrated
    ]
    if different or not own:
        shown = ", ".join(different[:3]) or "no quantizer"
        raise ConfigError(
            f"start_from_: got models that differ in their quantizers ({shown}); expected the same "
            "network, quantized by the same rules and calibrated"
        )
    return [(own[path], others[path].ends()) for path in own]


def _grid(quantizer: TensorQuantizer) -> tuple[Any, ...]:
    """Return what makes the codes of two quantizers mean the same."""
    d = quantizer.descriptor
    return d.format, d.granularity, d.symmetric, d.block_scale_format


def _norms_behind(model: nn.Module, example: Any) -> tuple[dict[str, nn.Module], str]:
    """Return the BatchNorm behind each layer by the layer's path, and why others have none."""
    structure = float_twin(model)  # Codes of now, which will be overwritten, are no obstacle.
    pairs, refusals = find_pairs(structure, find_flow(structure, example)[0])
    norms = {pair.layers[0]: model.get_submodule(pair.norm) for pair in pairs if not pair.before}
    return norms, "; ".join(f"{refusal.name}: {refusal.reason}" for refusal in refusals[:3])


def _same_parameters(path: str, layer: nn.Module, twin: nn.Module, refusals: str) -> list[_Change]:
    """Return the parameters of a layer without a BatchNorm, as its twin has them."""
    own = dict(layer.named_parameters(recurse=False))
    others = dict(twin.named_parameters(recurse=False))
    if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in others.items()}:
        reason = refusals or "give an example if torch.fx cannot trace the model"
        raise ConfigError(
            f"{path}: got parameters of other names or shapes in the two models; expected the "
            f"same, or a BatchNorm behind the layer that can be folded ({reason})"
        )
    return [_Change(own[name], others[name]) for name in own]


def _before_norm(path: str, layer: Any, norm: Any, twin: Any) -> tuple[Tensor, list[_Change]]:
    """Return the factor of the BatchNorm, > 0, and what makes layer and BatchNorm the twin."""
    scale, shift = norm_affine(norm)
    if not isinstance(norm.bias, nn.Parameter) or twin.bias is None:
        raise ConfigError(
            f"{path}: got a BatchNorm without affine parameters, or a twin without a bias; "
            "expected a shift in both. Fold the twin by torchq.fuse_ before quantize_"
        )
    sign = torch.where(scale < 0, -1.0, 1.0)
    factor = torch.where(scale == 0, 1.0, scale.abs())
    unfolded = _scaled(layer, twin.weight, 1 / factor)
    bias = torch.zeros_like(scale) if layer.bias is None else layer.bias.double().cpu()
    moved = norm.bias.double().cpu() + twin.bias.double().cpu() - scale * bias - shift
    changes = [
        _Change(layer.weight, unfolded),
        _Change(norm.weight, norm.weight.cpu() * sign),
        _Change(norm.running_mean, norm.running_mean.cpu() * sign),
        _Change(norm.bias, moved),
    ]
    if layer.bias is not None:
        changes.append(_Change(layer.bias, bias * sign))
    trial = copy_module(layer)
    trial.weight.copy_(unfolded)
    for own, other in zip(quantizers(trial).values(), quantizers(twin).values(), strict=True):
        own.set_ends(other.ends())
    obstacle = trial.output_scale_obstacle(1 / factor)
    if obstacle is not None:
        raise ConfigError(f"{path}: {obstacle}")
    return factor, changes


def _scaled(layer: Any, weight: Tensor, factor: Tensor) -> Tensor:
    """Return a weight of ``layer`` times one factor for each output channel, float64."""
    groups, transposed = getattr(layer, "groups", 1), layer.channel_axis == 1
    zeros = torch.zeros_like(factor)
    return fold_affine_after(
        weight.double().cpu(), None, factor, zeros, groups=groups, transposed=transposed
    ).kernel


def _into_branches(path: str, layer: Any, twin: Any) -> list[_Change]:
    """Return the parameters with which the branches amount to the kernel and bias of the twin."""
    with torch.enable_grad():
        kernel, bias = layer.equivalent()
        changes = [
            _moved(path, layer, kernel, twin.weight),
            _moved(path, layer, bias, twin.bias),
        ]
    kept = [change.tensor.clone() for change in changes]
    for change in changes:
        change.tensor.copy_(change.value)
    reached = layer.equivalent()
    for change, value in zip(changes, kept, strict=True):
        change.tensor.copy_(value)
    for found, wanted in zip(reached, (twin.weight, twin.bias), strict=True):
        if float((found - wanted).abs().max()) > _TOLERANCE * float(wanted.abs().max() + 1):
            raise _no_branch(path)
    return changes


def _moved(path: str, layer: Any, found: Tensor, wanted: Tensor) -> _Change:
    """Return the change of the one parameter that moves ``found`` to ``wanted``, one to one.

    ``found`` is linear in each parameter. Where an element depends on the element of the same
    place alone, the gradient of the sum is the factor between the two.
    """
    candidates = [p for p in layer.branches.parameters() if p.shape == found.shape]
    factors = (
        torch.autograd.grad(found.sum(), candidates, retain_graph=True, allow_unused=True)
        if candidates
        else ()
    )
    usable = [
        (float(factor.abs().min()), parameter, factor)
        for parameter, factor in zip(candidates, factors, strict=True)
        if factor is not None
    ]
    least, parameter, factor = max(usable, key=lambda item: item[0], default=(0.0, None, None))
    if parameter is None or factor is None or not least > 0:
        raise _no_branch(path)
    difference = (wanted.double() - found.detach().double()) / factor.double()
    return _Change(parameter, parameter.detach().double() + difference)


def _no_branch(path: str) -> ConfigError:
    return ConfigError(
        f"{path}: got branches none of which can take any kernel of the merged layer; expected a "
        "convolution of its size with a BatchNorm of its own"
    )
