"""``torchq.deploy``: a calibrated model on integer kernels."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchq.errors import ExportError
from torchq.graph import forward_hook_kind
from torchq.lowering.graph.partition import fuse_layers
from torchq.lowering.graph.traced_module import copy_plain_attributes
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.ops.onednn import saturates
from torchq.lowering.reference_check import ReferenceCheck, Verdict
from torchq.lowering.registry import FLOAT_INPUT, lower, uncalibrated
from torchq.lowering.weight_hooks import remove_weight_hooks, stores_weight
from torchq.nn import QuantModule, RoutedModule
from torchq.utils import copy_module, modules_with_names, set_submodule
from torchq.workflow import freeze_

__all__ = ["deploy"]

log = logging.getLogger(__name__)


def deploy(
    model: nn.Module, example: Any = None, *, reduce_range: bool = False, fuse: bool = True
) -> nn.Module:
    """Return a copy of a calibrated model that computes on integers, for inference.

    Every quantized convolution and linear layer becomes one that multiplies uint8 activations
    with int8 weights. Where the model can be traced, neighbouring layers are fused as well:
    BatchNorm, activations and residual additions move into the kernels, and tensors that only
    integer layers read are passed on as uint8. Layers without an integer kernel keep simulating;
    :func:`torchq.summary` of the result says which, and why.

    Args:
        model: calibrated; left unchanged.
        example: arguments for one call of the model, see :func:`torchq.graph.call_model`. With it
            the result is run once and compared with the simulation. A large difference is an
            error; it is a warning where every layer agrees when it is given the inputs of the
            simulation, as the model then only amplifies ties.
        reduce_range: round weights to 7 bits. For CPUs without VNNI, whose kernels add pairs of
            products in 16 bits: 8-bit weights can overflow there (there is a warning).
        fuse: False replaces layers only, each with floating-point input and output, and does not
            trace the model.

    Returns:
        A new module in eval mode, on the device of the model. It can be copied, pickled, compiled
        and exported. Its 4-d results are channels last in memory.

    Raises:
        ExportError: there is nothing to deploy, or quantizers are not calibrated (the text names
            them), or a class of the model refuses to be copied, or the result for ``example``
            differs from the simulation by more than -20 dB and by more than quantization itself
            makes.

    Example:
        >>> layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)
        >>> model = torch.nn.Sequential(*layers).eval()
        >>> report = torchq.quantize_(model)
        >>> x = torch.randn(1, 3, 8, 8)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> int8 = torchq.deploy(model)
        >>> bool((int8(x) - model(x)).abs().max() < 0.02)
        True
    """
    _require_calibrated(model)
    simulated = _copy(model)
    freeze_(simulated)
    simulated.eval().requires_grad_(False)
    result = _replace_layers(copy_module(simulated), reduce_range)
    check = None if example is None else ReferenceCheck(simulated, example)
    if fuse:
        result = fuse_layers(result, None if check is None else lambda m: check(m).problem)
    _warn_of_saturation(result, reduce_range)
    if check is not None:
        _report(check(result), fuse)
    return result


def _report(verdict: Verdict, fuse: bool) -> None:
    """Raise an error or warn if the deployed model differs from the simulation."""
    if verdict.problem:
        advice = ". Pass fuse=False to keep the forward of every module" if fuse else ""
        raise ExportError(f"deploy: {verdict.problem}{advice}")
    if verdict.note:
        warnings.warn(
            f"deploy: {verdict.note}: the model amplifies values that are rounded the other way "
            "at a tie. Its quantized results depend on the machine that computes them",
            stacklevel=3,
        )


def _require_calibrated(model: nn.Module) -> None:
    if not any(isinstance(m, QuantModule) for m in model.modules()):
        raise ExportError(
            f"deploy: {type(model).__name__} has no quantized layer; expected a calibrated model. "
            "Run torchq.quantize_ first"
        )
    if unknown := uncalibrated(model):
        raise ExportError(
            f"deploy: no range is known for {', '.join(unknown)}; expected calibrated quantizers. "
            "Run torchq.calibrate first"
        )


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy_module(model)
    except Exception as error:  # classes copy themselves in any way they like
        reason = str(error).partition("\n")[0]
        raise ExportError(
            f"deploy: got a {type(model).__name__} that cannot be copied ({reason}); expected one "
            "whose modules copy.deepcopy can copy"
        ) from error


def _replace_layers(model: nn.Module, reduce_range: bool) -> nn.Module:
    """Replace every quantized layer that has an integer kernel, and round the weights of others.

    Args:
        model: changed in place.
        reduce_range: see :func:`deploy`.

    Returns:
        The model, or the new layer if the model itself is one.
    """
    routed = [module for module in model.modules() if isinstance(module, RoutedModule)]
    held = {id(holder) for module in routed for _, holder in module.holders()}
    float_inputs: list[str] = []
    for names, module in list(modules_with_names(model)):
        if not isinstance(module, QuantModule) or module.is_container:
            continue
        remove_weight_hooks(module)
        hook = forward_hook_kind(module)
        if hook:
            new: nn.Module | str = f"it has {hook}"
        elif isinstance(module, RoutedModule) or id(module) in held:
            new = "its weight is used by a function call in a forward"
        else:
            new = lower(module, reduce_range)
        if isinstance(new, str):
            log.debug("deploy: %s keeps simulating: %s", names[0], new)
            if new == FLOAT_INPUT:
                float_inputs.append(names[0] or type(module).__name__)
            _round_weights(module, new)
            continue
        new.eval()
        copy_plain_attributes(module, new)
        for name in names:
            if name:
                set_submodule(model, name, new)
            else:
                model = new
    _warn_of_float_inputs(float_inputs)
    return model


def _warn_of_float_inputs(names: Sequence[str]) -> None:
    """Warn about layers that run in float because their weight alone is quantized."""
    if names:
        warnings.warn(
            f"deploy: the weight of {', '.join(names)} is quantized, but the input is not, so "
            "nothing there runs on integers. A target without an integer kernel for a layer "
            "leaves its input float. Call torchq.quantize_ without a target for torchq.deploy",
            stacklevel=4,
        )


def _round_weights(module: QuantModule, reason: str) -> None:
    """Round the weights once instead of at every call, and leave a note for the summary.

    A weight that a hook or a parametrization computes is still rounded at every call.
    """
    module.deploy_note = reason  # type: ignore[assignment]
    if forward_hook_kind(module):
        return
    with torch.no_grad():
        for quantizer, weight in module.quantized_weights():
            if stores_weight(module, weight):
                weight.copy_(quantizer(weight))
                quantizer.mode = "off"


def _warn_of_saturation(model: nn.Module, reduce_range: bool) -> None:
    """Warn if kernels of this CPU may overflow for the layers of ``model``."""
    layers = [m for m in model.modules() if isinstance(m, Int8Layer)]
    wide = any(layer.input_qparams.quant_max > 127 for layer in layers)
    if reduce_range or not wide or not saturates():
        return
    warnings.warn(
        "deploy: this CPU has no VNNI instructions, its kernels add pairs of products in 16 bits "
        "and can overflow, with errors of several percent. Pass reduce_range=True for 7-bit "
        "weights",
        stacklevel=3,
    )
