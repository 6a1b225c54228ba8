"""``torchq.deploy``: a calibrated model on integer kernels."""

from __future__ import annotations

import copy
import logging
import warnings
from typing import Any

import torch
from torch import nn

from torchq.errors import ExportError
from torchq.graph import call_model, forward_hook_kind, tensors_in
from torchq.lowering.graph.partition import chain
from torchq.lowering.graph.traced_module import adopt
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.ops.onednn import saturates
from torchq.lowering.registry import lower, uncalibrated
from torchq.nn import QuantModule
from torchq.utils import modules_with_names, set_submodule
from torchq.workflow import disabled, freeze_

__all__ = ["deploy"]

log = logging.getLogger(__name__)


def deploy(
    model: nn.Module, example: Any = None, *, reduce_range: bool = False, chains: bool = True
) -> nn.Module:
    """A copy of a calibrated model that computes on real integers, for inference.

    Every quantized convolution and linear layer becomes one that multiplies uint8 activations with int8 weights. Where the model can be
    traced, chains of layers are joined as well: BatchNorm, activations and residual additions move into the kernels, and tensors that
    only integer layers read are passed on as uint8. Layers without an integer kernel keep simulating; :func:`torchq.summary` of the
    result says which, and why.

    Args:
        model: calibrated, left unchanged.
        example: an input (tuple: positional arguments, dict: keyword arguments). With it the result is run once and compared with the
            simulation; a large difference is an error.
        reduce_range: give weights 7 bits. For CPUs without VNNI, whose kernels add pairs of products in 16 bits: 8-bit weights
            against 8-bit activations overflow there (there is a warning).
        chains: False replaces layers only, each with floating-point input and output, and does not trace.

    Returns:
        a new module in eval mode, on the CPU or wherever the model is. It can be copied, pickled, compiled and exported; 4-d results
        are channels last in memory.

    Raises:
        ExportError: there is nothing to deploy, quantizers are not calibrated (the text names them), or the result for ``example``
            differs from the simulation by more than -20 dB and more than quantization itself makes.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3)).eval()
        >>> report = torchq.quantize_(model)
        >>> x = torch.randn(1, 3, 8, 8)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> int8 = torchq.deploy(model)
        >>> bool((int8(x) - model(x)).abs().max() < 0.02)
        True
    """
    _check(model)
    simulated = copy.deepcopy(model)
    freeze_(simulated)
    simulated.eval().requires_grad_(False)
    result = _replace(copy.deepcopy(simulated), reduce_range)
    reference = None if example is None else _Reference(simulated, example)
    if chains:
        result = chain(result, reference)
    _warn_of_saturation(result, reduce_range)
    if reference is not None and (problem := reference.problem(result)):
        raise ExportError(f"deploy: {problem}. Pass chains=False, and tell us")
    return result


def _check(model: nn.Module) -> None:
    if not any(isinstance(m, QuantModule) for m in model.modules()):
        raise ExportError(
            f"deploy: {type(model).__name__} has no quantized layer; expected a calibrated model. Run torchq.quantize_ first"
        )
    if unknown := uncalibrated(model):
        raise ExportError(
            f"deploy: no range is known for {', '.join(unknown)}; expected calibrated quantizers. Run torchq.calibrate first"
        )


def _replace(model: nn.Module, reduce_range: bool) -> nn.Module:
    """Put an integer layer in the place of every quantized one that has one; bake the weights of the others."""
    for names, module in list(modules_with_names(model)):
        if not isinstance(module, QuantModule) or module.is_container:
            continue
        hook = forward_hook_kind(module)
        new = f"it has {hook}" if hook else lower(module, reduce_range)
        if isinstance(new, str):
            log.debug("deploy: %s keeps simulating: %s", names[0], new)
            _bake(module, new)
            continue
        new.eval()
        adopt(new, module)
        for name in names:
            if name:
                set_submodule(model, name, new)
            else:
                model = new
    return model


def _bake(module: QuantModule, reason: str) -> None:
    """Round the weights once instead of at every call, and leave a note for the summary."""
    module.deploy_note = reason  # type: ignore[assignment]
    with torch.no_grad():
        for quantizer, weight in module.quantized_weights():
            weight.copy_(quantizer(weight))
            quantizer.mode = "off"


def _warn_of_saturation(model: nn.Module, reduce_range: bool) -> None:
    layers = [m for m in model.modules() if isinstance(m, Int8Layer)]
    if reduce_range or not saturates() or not any(m.input_qparams.quant_max > 127 for m in layers):
        return
    warnings.warn(
        "deploy: this CPU has no VNNI instructions, its kernels add pairs of products in 16 bits and can overflow; "
        "expected errors of several percent. Pass reduce_range=True for 7-bit weights",
        stacklevel=3,
    )


class _Reference:
    """The results of the simulation for an example, to compare others with."""

    def __init__(self, simulated: nn.Module, example: Any) -> None:
        self.example = example
        with torch.no_grad():
            self.expected = list(tensors_in(call_model(simulated, example)))
            with disabled(simulated):
                floats = list(tensors_in(call_model(simulated, example)))
        # A deep net makes another sample of its quantization noise of every tie that is rounded the other way: two samples differ by
        # sqrt(2) times either.
        pairs = zip(self.expected, floats, strict=True)
        self.noise = [
            2**0.5 * (expected.double() - exact.double()).norm() for expected, exact in pairs
        ]

    def problem(self, model: nn.Module) -> str:
        """What is wrong with the results of ``model``; nothing if they agree."""
        with torch.no_grad():
            results = list(tensors_in(call_model(model, self.example)))
        for number, (expected, noise, got) in enumerate(
            zip(self.expected, self.noise, results, strict=True)
        ):
            if expected.shape != got.shape:
                return f"result {number} has shape {tuple(got.shape)}; expected {tuple(expected.shape)}"
            error, size = (got.double() - expected.double()).norm(), expected.double().norm()
            if not bool(error <= torch.maximum(size * 0.1, noise)):
                return (
                    f"result {number} has relative error {float(error / size):.2g} against the simulation; expected at most 0.1, or what "
                    f"quantization itself makes ({float(noise / size):.2g})"
                )
        return ""

    def runs(self, model: nn.Module) -> bool:
        """Whether ``model`` raises nothing."""
        return self._attempt(model) is not None

    def accepts(self, model: nn.Module) -> bool:
        """Whether ``model`` runs and agrees."""
        return self._attempt(model) == ""

    def _attempt(self, model: nn.Module) -> str | None:
        try:
            problem = self.problem(model)
        except Exception as error:  # the model's own code, which may read anything of its parts
            log.debug("deploy: %s: %s", type(error).__name__, error)
            return None
        if problem:
            log.debug("deploy: %s", problem)
        return problem
