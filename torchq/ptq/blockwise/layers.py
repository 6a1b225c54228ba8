"""The layers that algorithms treat, and what they need before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from torchq.errors import ConfigError
from torchq.nn import QuantModule, TensorQuantizer
from torchq.workflow import quantizers, weight_quantizers

__all__ = ["check_calibrated", "check_ready", "find_layers", "weight_quantizer"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_layers(model: nn.Module) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the quantized Linear and Conv layers, and why other quantized layers are left alone.

    Args:
        model: a quantized model.

    Returns:
        path -> layer, and path -> reason.
    """
    layers: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantModule) and list(module.quantized_weights()):
            reason = _obstacle(model, module)
            if reason is None:
                layers[name] = module
            else:
                skipped[name] = reason
    return layers, skipped


def _obstacle(model: nn.Module, module: QuantModule) -> str | None:
    """Return why the weight of a quantized module cannot be rounded otherwise, or None."""
    if not isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        return f"{type(module).__name__} is no convolution or linear layer"
    if parametrize.is_parametrized(module):
        return "its weight is computed by a parametrization"
    quantizer = weight_quantizer(module)
    descriptor = quantizer.descriptor
    if not quantizer.quantizing:
        return "its weight quantizer is off"
    if descriptor.dynamic:
        return "its weight range is dynamic: it would change with the rounded weights"
    if not descriptor.symmetric:
        return "its weight range is asymmetric"
    if not descriptor.fake_quant:
        return "its weight quantizer returns codes"
    owners = [m for m in model.modules() if any(p is module.weight for p in m.parameters(False))]
    return "it shares its weight with another module" if len(owners) > 1 else None


def weight_quantizer(layer: Any) -> TensorQuantizer:
    """Return the quantizer of the weight of a Linear or Conv layer."""
    ((quantizer, _),) = layer.quantized_weights()
    return quantizer


def check_ready(
    where: str, model: nn.Module, layers: Mapping[str, Any], skipped: Mapping[str, str]
) -> None:
    """Raise an error unless there are layers to treat and every fixed range is known.

    Args:
        where: the start of error texts.
        model: a quantized model.
        layers: what :func:`find_layers` found.
        skipped: the same.
    """
    if not layers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise ConfigError(
            f"{where}: got no layer to treat ({reasons or 'none is quantized'}); expected a model "
            "with quantized Linear or Conv layers. Run torchq.quantize_ and torchq.calibrate first"
        )
    check_calibrated(where, model)


def check_calibrated(where: str, model: nn.Module) -> None:
    """Raise an error unless every fixed range of an activation is known.

    Args:
        where: the start of error texts.
        model: a quantized model.
    """
    weights = weight_quantizers(model)
    for name, quantizer in quantizers(model).items():
        is_fixed = quantizer.quantizing and not quantizer.descriptor.dynamic
        if is_fixed and not quantizer.calibrated and id(quantizer) not in weights:
            raise ConfigError(
                f"{where}: {name} has no range yet; expected a calibrated model. Run "
                "torchq.calibrate(model, batches) first"
            )
