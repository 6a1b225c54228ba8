"""What calibration adds to the results of a layer, to take back what quantization does to them.

``result = gain * (x @ weight) + bias + shift``, with one number for each output channel. Both are
buffers beside the weights, empty from construction on, so that parameters, optimizers and the keys
of a state dict never change, and :func:`torchq.restore_` gives the float bits back. A file and a
kernel have the gain in the scale of the weight and the shift in the bias: no code changes.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.2; the gain is the least-squares fit beside it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.fusion.modules import OutputFold
from torchq.nn.optional_buffers import CORRECTION, follow_keys, lacking_keys
from torchq.utils import constant_while_tracing, state_kept

M = TypeVar("M", bound=nn.Module)


class Corrected(nn.Module):
    """Mixin of quantized layers with a weight and a bias, whose results can be corrected.

    Where both quantizers are off, results are those of the float layer.

    Attributes:
        output_gain: what the products of each output channel are multiplied by, (channels,); empty
            for 1.
        output_shift: what is added to the bias, (channels,); empty for 0.
        needs_no_correction: True where a calibration has tried one and left it out.
    """

    output_gain: Tensor
    output_shift: Tensor
    needs_no_correction: bool = False

    def attach_quantizers(self, **descriptors: QuantDescriptor | None) -> None:
        """Add the quantizers, and the buffers of the correction."""
        super().attach_quantizers(**descriptors)  # type: ignore[misc]
        self.forget_correction()

    def detach_quantizers(self) -> None:
        """Remove the quantizers and the correction."""
        super().detach_quantizers()  # type: ignore[misc]
        for buffer in CORRECTION:
            delattr(self, buffer.name)

    @property
    def is_corrected(self) -> bool:
        """True if results have a shift, and perhaps a gain."""
        # The layers of another library's names have no correction.
        return "output_shift" in self._buffers and _holds(self.output_shift)

    @property
    def _corrects(self) -> bool:
        quantizers: Any = (self.weight_quantizer, self.input_quantizer)
        return self.is_corrected and any(
            getattr(q, "quantizing", False) for q in quantizers
        )

    def correct_output_(self, gain: Tensor | None, shift: Tensor) -> None:
        """Set the correction of results; see the attributes."""
        weight: Any = self.weight
        self.forget_correction()
        # Training reads what was found in inference mode.
        with torch.inference_mode(False):
            if gain is not None:
                self.output_gain = gain.detach().clone().to(weight)
            self.output_shift = shift.detach().clone().to(weight)

    def forget_correction(self) -> None:
        """Let results be what the quantized weight gives."""
        weight: Any = self.weight
        vars(self).pop("needs_no_correction", None)
        with torch.inference_mode(False):
            for buffer in CORRECTION:
                buffer.drop(self, weight)

    def corrected_weight(self, weight: Tensor) -> Tensor:
        """Return the quantized weight, or its scales, times the gain of each output channel."""
        if not (self._corrects and _holds(self.output_gain)):
            return weight
        return weight * self.output_gain.to(weight).view(-1, *[1] * (weight.dim() - 1))

    def corrected_bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias with the shift."""
        return bias if bias is None or not self._corrects else bias + self.output_shift

    def fold_correction_(self) -> None:
        """Put gain and shift into the scale of the weight and the bias, for good.

        The weight is written on the grid that it has with the gain, as where a BatchNorm is folded
        in: see :mod:`torchq.nn.weight_grid`. Both are new parameters of this layer
        alone: another one that shares them keeps what it has.
        """
        if not self._corrects:
            return
        layer = cast(Any, self)
        weight = layer.weight
        bias = layer.bias
        gain = self.output_gain
        with torch.no_grad():
            layer.bias = nn.Parameter(bias + self.output_shift, bias.requires_grad)
            if _holds(gain):
                scaled = layer.scale_weight_(layer.per_weight(gain.double()))
                layer.weight = nn.Parameter(scaled.values, weight.requires_grad)
        self.forget_correction()

    def fold_output_(self, scale: Tensor, shift: Tensor) -> OutputFold:
        """Scale the shift too; see :class:`torchq.nn.batchnorm_folding.OutputScaling`."""
        outcome: OutputFold = super().fold_output_(scale, shift)  # type: ignore[misc]
        if self.is_corrected:
            self.output_shift = self.output_shift * scale.to(self.output_shift)
        return outcome

    def _channels(self) -> tuple[int, ...]:
        bias: Any = self.bias
        return (0,) if bias is None else tuple(bias.shape)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        has_ranges = f"{prefix}weight_quantizer.amax" in state_dict
        stored = [state_dict.get(prefix + buffer.name) for buffer in CORRECTION]
        describes = has_ranges or any(value is not None for value in stored)
        if CORRECTION[1].name in self._buffers:
            fits = all(
                value is None or not value.numel() or value.shape == self._channels()
                for value in stored
            )
            if describes and fits:  # A wrong shape stays an error of torch.
                follow_keys(
                    self, CORRECTION, state_dict, prefix, cast(Any, self).weight
                )
            elif self.is_corrected and self._has_other_weights(state_dict, prefix):
                self.forget_correction()  # It was fitted to the weights before.
        missing: list[str] = args[2]
        before = len(missing)
        super()._load_from_state_dict(state_dict, prefix, *args)
        names = {prefix + buffer.name for buffer in CORRECTION}
        added = [key for key in missing[before:] if key not in names]
        missing[before:] = added + lacking_keys(CORRECTION, state_dict, prefix)

    def _has_other_weights(self, state_dict: dict[str, object], prefix: str) -> bool:
        """Return True if a state dict has another weight or bias than the layer."""
        for name, parameter in self.named_parameters(recurse=False):
            value = state_dict.get(prefix + name)
            if (
                isinstance(value, Tensor)
                and not value.is_meta
                and not parameter.is_meta
            ):
                same = value.shape == parameter.shape and torch.equal(
                    value.to(parameter), parameter
                )
                if not same:
                    return True
        return False


def _holds(numbers: Tensor) -> bool:
    with constant_while_tracing():
        return bool(numbers.numel())


def fold_corrections_(model: M) -> M:
    """Put the corrections of all layers into their parameters, for good; return the model."""
    for module in model.modules():
        if isinstance(module, Corrected):
            module.fold_correction_()
    return model


@contextmanager
def folded_corrections(
    model: nn.Module,
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Let the parameters of a model be those of kernels and files, inside a ``with`` block.

    Yields a context manager, for blocks inside it, in which they are those of the float model.
    """
    layers = corrected_layers(model)
    in_float = [
        (layer, dict(layer.named_parameters(recurse=False))) for layer in layers
    ]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(state_kept(layer))
            for parameter in layer.parameters():  # among them ranges that are learned
                stack.callback(setattr, parameter, "data", parameter.data)
            layer.fold_correction_()
        yield partial(_with_parameters, in_float)


@contextmanager
def _with_parameters(
    parameters: list[tuple[Corrected, dict[str, nn.Parameter]]],
) -> Iterator[None]:
    """Let layers have other parameters for a while."""
    with ExitStack() as stack:
        for layer, others in parameters:
            for name, parameter in others.items():
                stack.callback(setattr, layer, name, getattr(layer, name))
                setattr(layer, name, parameter)
        yield


def corrected_layers(model: nn.Module) -> list[Corrected]:
    """Return the layers of a model whose results are corrected."""
    return [m for m in model.modules() if isinstance(m, Corrected) and m.is_corrected]


def forget_corrections(model: nn.Module) -> None:
    """Let all layers of a model compute without a correction."""
    for layer in model.modules():
        if isinstance(layer, Corrected) and (
            layer.is_corrected or layer.needs_no_correction
        ):
            layer.forget_correction()


@contextmanager
def without_corrections(model: nn.Module) -> Iterator[None]:
    """Let all layers of a model compute without a correction, inside the ``with`` block."""
    held = [
        (layer, layer.output_gain, layer.output_shift)
        for layer in corrected_layers(model)
    ]
    try:
        forget_corrections(model)
        yield
    finally:
        for layer, gain, shift in held:
            layer.output_gain = gain
            layer.output_shift = shift
