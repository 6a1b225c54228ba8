"""The quantized layers of a model: what is compared, switched on and off, and named in reports."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.graph.operators import LAYERS
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.calls.modules import RoutedModule
from torchq.nn.calls.routes import site_descriptors
from torchq.nn.correction import corrected_layers
from torchq.runtime import reference_runtime
from torchq.utils import child_path, state_kept
from torchq.workflow import quantizers, weight_quantizers

#: The most bits of a weight that ``mixed_precision`` gives unless told.
_SEARCHED_BITS = 8


@dataclass(frozen=True)
class QuantizedLayer:
    """One module with quantizers that are on, by path: of inputs and intermediates, of weights."""

    name: str
    module: nn.Module
    inputs: dict[str, TensorQuantizer]
    weights: dict[str, TensorQuantizer]

    @property
    def quantizers(self) -> dict[str, TensorQuantizer]:
        """All its quantizers by path."""
        return {**self.inputs, **self.weights}

    @property
    def kind(self) -> str:
        """The class that the user knows, such as ``Conv2d``."""
        if isinstance(self.module, QuantModule):
            return self.module.float_class.__name__
        return type(self.module).__qualname__


def quantized_layers(model: nn.Module, where: str) -> list[QuantizedLayer]:
    """Return the layers of ``model`` in the order of ``named_modules()``.

    A layer is a quantized module. A quantizer that the author of the model placed in a module of
    another kind is a layer of its own. Without any an error names ``where``, which asks.
    """
    weights = weight_quantizers(model)
    held = {id(holder) for module in model.modules() for _, holder in _holders(module)}
    layers = []
    for name, module in model.named_modules():
        if id(module) in held:
            continue
        direct = dict(_direct(name, module))
        if isinstance(module, QuantModule):
            for path, holder in _holders(module):
                direct.update(_direct(child_path(name, path), holder))
            layers.append(_layer(name, module, direct, weights))
        else:
            layers += [
                _layer(path, q, {path: q}, weights) for path, q in direct.items()
            ]
    if isinstance(model, TensorQuantizer) and model.quantizing:
        layers.append(_layer("", model, {"": model}, weights))
    layers = [layer for layer in layers if layer.quantizers]
    if not layers:
        raise ConfigError(
            f"{where}: {type(model).__name__} has no quantizer that is on; expected a quantized "
            "model. Run torchq.quantize_(model) and torchq.calibrate(model, batches) first"
        )
    return layers


def _holders(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what holds quantizers for calls of a forward, with its path; no layers themselves."""
    if not isinstance(module, RoutedModule):
        return []
    return [
        (site.holder, holder)
        for site, holder in module.holders()
        if holder is not module and next(holder.parameters(recurse=False), None) is None
    ]


def _direct(name: str, module: nn.Module) -> Iterator[tuple[str, TensorQuantizer]]:
    for child_name, child in module.named_children():
        if isinstance(child, TensorQuantizer) and child.quantizing:
            yield child_path(name, child_name), child


def _layer(
    name: str, module: nn.Module, found: dict[str, TensorQuantizer], weights: set[int]
) -> QuantizedLayer:
    of_weights = {path: q for path, q in found.items() if id(q) in weights}
    inputs = {path: q for path, q in found.items() if path not in of_weights}
    return QuantizedLayer(name, module, inputs, of_weights)


def channel_axes(module: nn.Module) -> dict[int, tuple[int, ...]]:
    """Return the axes of the output channels in each weight of a module, by id of its quantizer.

    A weight whose channels have no axis of their own, as in einsum, is missing. For ``x @ weight``
    they are the last axis, where a linear layer has them on the first.
    """
    if not isinstance(module, QuantModule):
        return {}
    weights = {
        id(quantizer): weight for quantizer, weight in module.quantized_weights()
    }
    if not isinstance(module, RoutedModule):
        return dict.fromkeys(weights, (module.channel_axis,))
    axes_by_id = {}
    for site, holder in module.holders():
        key = id(getattr(holder, "weight_quantizer", None))
        if key in weights:
            like_linear = QuantDescriptor(axis=0)
            descriptor = site_descriptors(site, weights[key].dim(), None, like_linear)[
                1
            ]
            if descriptor is not None and descriptor.axis is not None:
                axis = descriptor.axis
                axes_by_id[key] = (axis,) if isinstance(axis, int) else axis
    return axes_by_id


def layers_with_weights(model: nn.Module) -> dict[int, nn.Module]:
    """Return convolutions and linear layers, by the id of the quantizer of their input."""
    layers: dict[int, nn.Module] = {}
    for module in model.modules():
        quantizer = getattr(module, "input_quantizer", None)
        if isinstance(module, LAYERS) and isinstance(quantizer, TensorQuantizer):
            layers.setdefault(id(quantizer), module)
    return layers


def largest_of_channels(layer: nn.Module, x: Tensor) -> Tensor:
    """Return the largest magnitude of each channel of an input of a layer, (channels,).

    Args:
        layer: a convolution or a linear layer.
        x: its input, with or without a dimension of samples.
    """
    is_linear = isinstance(layer, nn.Linear)
    spatial = 0 if is_linear else cast(Tensor, layer.weight).dim() - 2
    channels = x.movedim(x.dim() - 1 - spatial, 0)
    return channels.reshape(len(channels), -1).abs().amax(1)


def active_quantizers(model: nn.Module) -> list[TensorQuantizer]:
    """Return the distinct quantizers of ``model`` that are on."""
    return [
        quantizer for quantizer in quantizers(model).values() if quantizer.quantizing
    ]


@contextmanager
def passing(model: nn.Module) -> Iterator[None]:
    """Let the model compute in float, with every call of a quantizer that is on.

    Attention, for one, takes a shorter way past quantizers that are off. Corrections, which belong
    to quantized results, are out of the way.
    """
    all_quantizers = list(quantizers(model).values())
    active = [quantizer for quantizer in all_quantizers if quantizer.quantizing]
    before = [(quantizer, quantizer.delegate) for quantizer in active]
    try:
        for quantizer in active:
            quantizer.delegate = lambda x, quantizer: x
        with ExitStack() as stack:
            for layer in corrected_layers(model):
                stack.enter_context(state_kept(layer))
                layer.forget_correction()
            stack.enter_context(switched_off(all_quantizers, but=active))
            yield
    finally:
        for quantizer, delegate in before:
            quantizer.delegate = delegate


def lines_without(names: Iterable[str]) -> str:
    """Return the lines that leave layers of a quantized ``model`` in float; they can be pasted.

    The others are calibrated anew, as results were corrected for the errors of these layers.
    """
    chosen = f"torchq.workflow.select_quantizers(model, {list(names)!r})"
    calibrate = "torchq.calibrate(model, batches, force=True)"
    return f"for q in {chosen}.values(): q.quantizing = False\n{calibrate}"


def line_equalized(target: str | None) -> str:
    """Return the line that quantizes a quantized ``model`` anew, with equalized channels."""
    equalize = "torchq.ptq.equalize_(model, batches[0])"
    quantize = f"torchq.quantize_(model, config, {example_for(target)})"
    calibrate = "torchq.calibrate(model, batches)"
    return f"torchq.restore_(model); {equalize}; {quantize}; {calibrate}"


def line_of_formats(weight_bits: float) -> str:
    """Return a search that gives weights half as many bits again as they have on average."""
    mean_bits = math.ceil(weight_bits * 1.5)
    if mean_bits <= _SEARCHED_BITS:
        return (
            "config = torchq.mixed_precision(model, batches, "
            f'budget={{"mean_bits": {mean_bits}}})'
        )
    # The formats that are searched by default have 8 bits at most.
    return (
        "config = torchq.mixed_precision(model, batches, "
        f'budget={{"mean_bits": {mean_bits}}}, formats=["float", "w8a8"])'
    )


def line_even_inputs(target: str | None) -> str:
    """Return the line that quantizes a quantized ``model`` anew, with even depthwise inputs."""
    quantize = f"torchq.quantize_(model, config, {example_for(target)})"
    even = "torchq.ptq.equalize_depthwise_(model, batches)"
    calibrate = "torchq.calibrate(model, batches)"
    return f"torchq.restore_(model); {quantize}; {even}; {calibrate}"


def example_for(target: str | None) -> str:
    """Return the arguments that give an example, and the target where there is one."""
    example = "example=batches[0]"
    return example if target is None else f"target={target!r}, {example}"


def named_target(target: str | None = None) -> str:
    """Return arguments that name a target, for lines that can be pasted: one that is anywhere."""
    return example_for(target or reference_runtime().name)


def line_with(arguments: str, target: str | None = None) -> str:
    """Return the line that quantizes a quantized ``model`` anew, with other arguments.

    ``target`` is that of its plan, which it keeps.
    """
    if target is not None:
        arguments = f"{arguments}, {example_for(target)}"
    quantize = f"torchq.quantize_(model, {arguments})"
    return f"torchq.restore_(model); {quantize}; torchq.calibrate(model, batches)"
