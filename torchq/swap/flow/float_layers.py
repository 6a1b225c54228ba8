"""The first layers of a network, which a runtime may run faster in float than on integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from torchq.graph import MAX_POOLING, Call, Flow, record
from torchq.nn import InputQuantized, QuantConv2d, TensorQuantizer
from torchq.swap.decision import Decision
from torchq.swap.flow.calls import clips, is_depthwise, is_leaf, moves_elements
from torchq.swap.targets import Target

_IMAGE_CHANNELS = 4
#: Results of a stem below which there is no time to save.
_FEW_RESULTS = 50_000
#: Float kernels are slow for depthwise convolutions whose channels are no multiple of this.
_ALIGNMENT = 4
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ACTIVATIONS = frozenset(["silu", "hardswish", "leaky_relu", "elu", "mish"])


def float_start(
    model: nn.Module, decisions: Sequence[Decision], target: Target, example: Any
) -> dict[str, str]:
    """Return path -> reason of the first layers, where a target runs them faster in float.

    They are the convolution that reads the image, its activation, and depthwise convolutions that
    read this: they have many results, and few products for each. Nothing stays float where
    max pooling reads a result, as it is fast between integers alone. A module whose rule is its
    path is left alone. The model is quantized; it runs once on the example.
    """
    if not target.float_stem:
        return {}
    movable = {id(d.module) for d in decisions if not d.reason and d.rule not in d.names}
    names = {id(module): name for name, module in model.named_modules()}
    reason = f"{target.name} runs the first layers faster in float"
    sizes: dict[int, int] = {}
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, QuantConv2d):
                note = partial(_note_size, sizes)
                stack.callback(module.register_forward_hook(note).remove)
        flow = record(model, example, is_leaf)
    stem = next((call for call in flow.calls if isinstance(call.module, nn.Conv2d)), None)
    if stem is None or not _is_stem(stem.module) or sizes[id(stem.module)] < _FEW_RESULTS:
        return {}
    parts = [stem, *_behind(flow, stem)]
    if any(_is_max_pooling(part) for part in parts):
        return {}
    return {names[id(part.module)]: reason for part in parts if id(part.module) in movable}


def _note_size(sizes: dict[int, int], layer: nn.Module, args: Any, result: Tensor) -> None:
    sizes[id(layer)] = result.numel()


def _is_stem(module: nn.Module | None) -> bool:
    return isinstance(module, QuantConv2d) and module.in_channels <= _IMAGE_CHANNELS


def _behind(flow: Flow, call: Call) -> Iterator[Call]:
    """Yield what reads the result of a stem: activations, depthwise convolutions, max pooling."""
    for reader in flow.consumers(call):
        module = reader.module
        if _is_max_pooling(reader):
            yield reader
        elif _is_pointwise(reader) or (
            isinstance(module, QuantConv2d)
            and is_depthwise(module)
            and module.groups % _ALIGNMENT == 0
        ):
            yield reader
            yield from _behind(flow, reader)


def _is_max_pooling(call: Call) -> bool:
    return isinstance(call.module, _MAX_POOLS) or call.name in MAX_POOLING


def _is_pointwise(call: Call) -> bool:
    """Return True for norms, activations and quantizers."""
    module = call.module
    if isinstance(module, (InputQuantized, *_NORMS, TensorQuantizer)):
        return "Pool" not in type(module).__name__
    return clips(call) or moves_elements(call) or (module is None and call.name in _ACTIVATIONS)
