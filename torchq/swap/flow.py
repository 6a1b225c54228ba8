"""What a run on an example decides: which layers stay float, which results are quantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from torch import Tensor, nn

from torchq.graph import Call, Flow, effects_of, is_torch_leaf, operator_named, record
from torchq.nn import (
    InputQuantized,
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantModule,
    TensorQuantizer,
    quantizing_only,
)
from torchq.runtime import Runtime
from torchq.swap.decision import Decision
from torchq.utils import untouched

_MOVING_MODULES = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)
_PADDING_MODULES = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


def is_leaf(module: nn.Module) -> bool:
    """Return True for modules that count as one call: quantized ones, and those of torch."""
    if isinstance(module, QuantModule):
        return not module.is_container and bool(module.slots())
    return isinstance(module, TensorQuantizer) or is_torch_leaf(module)


def is_depthwise(module: nn.Module | None) -> TypeGuard[nn.Conv1d | nn.Conv2d | nn.Conv3d]:
    """Return True for a convolution of each channel by itself."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    return 1 < module.groups == module.in_channels == module.out_channels


def is_float_layer(module: nn.Module | None) -> bool:
    """Return True for a layer with weights that is not quantized."""
    return isinstance(module, _LAYERS) and not isinstance(module, QuantModule)


def is_relu(call: Call) -> bool:
    """Return True for a ReLU, as a module or as a function."""
    return isinstance(call.module, nn.ReLU) or _operator(call) == "relu"


def _operator(call: Call) -> str:
    """Return the name of the operator of a function call; "" for modules and other functions."""
    row = None if call.module is not None else operator_named(call.name)
    return "" if row is None else row.name


def _has(call: Call, effect: str) -> bool:
    """Return True for a function call that has an effect; see :class:`torchq.graph.Operator`."""
    return call.module is None and effect in effects_of(call.name)


def clips(call: Call) -> bool:
    """Return True for ReLU and its like, which a quantizer behind them includes."""
    return isinstance(call.module, (nn.ReLU, nn.Hardtanh)) or _has(call, "clip")


def moves_elements(call: Call) -> bool:
    """Return True for a call that rearranges the elements of a tensor, or returns it."""
    if call.module is None:
        return _has(call, "move")
    return isinstance(call.module, _MOVING_MODULES) and not isinstance(call.module, QuantModule)


def pads_with_zeros(call: Call) -> bool:
    """Return True for zeros around a tensor, which files let convolutions behind them add."""
    module = call.module
    if module is not None:
        return isinstance(module, _PADDING_MODULES) and module.value == 0
    given = {**dict(zip(("pad", "mode", "value"), call.arguments, strict=False)), **call.options}
    return call.name == "pad" and given.get("mode") in (None, "constant") and not given.get("value")


def quantizes(call: Call) -> bool:
    """Return True for a quantizer, and for a layer that quantizes what it reads."""
    module = call.module
    if isinstance(module, TensorQuantizer):
        return module.quantizing
    return isinstance(module, QuantModule) and all(_reads_quantized(module))


def _reads_quantized(module: QuantModule) -> Iterator[bool]:
    for slot in module.input_slots:
        quantizer = getattr(module, f"{slot}_quantizer")
        yield isinstance(quantizer, TensorQuantizer) and quantizer.quantizing


@contextmanager
def computing_in_float(model: nn.Module) -> Iterator[None]:
    """Let a model compute with all quantizers off, in eval mode; give its state back at the end."""
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    with quantizing_only(quantizers), untouched(model):
        yield


_IMAGE_CHANNELS = 4
#: Results of a stem below which there is no time to save.
_FEW_RESULTS = 50_000
#: Float kernels are slow for depthwise convolutions whose channels are no multiple of this.
_ALIGNMENT = 4
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ACTIVATIONS = frozenset(["silu", "hardswish", "leaky_relu", "elu", "mish"])


def float_start(
    model: nn.Module, decisions: Sequence[Decision], target: Runtime, example: Any
) -> dict[str, str]:
    """Return path -> reason of the first layers, where a target runs them faster in float.

    They are the convolution that reads the image, its activation, and depthwise convolutions that
    read this: they have many results, and few products for each. Nothing stays float where
    max pooling reads a result, as it is fast between integers alone. A module whose rule is its
    path is left alone. The model is quantized; it runs once on the example.
    """
    if target.placement is None or not target.placement.float_stem:
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
    return isinstance(call.module, _MAX_POOLS) or _has(call, "max")


def _is_pointwise(call: Call) -> bool:
    """Return True for norms, activations and quantizers."""
    module = call.module
    if isinstance(module, (InputQuantized, *_NORMS, TensorQuantizer)):
        return "Pool" not in type(module).__name__
    return clips(call) or moves_elements(call) or _operator(call) in _ACTIVATIONS


_CONVOLUTIONS = (QuantConv1d, QuantConv2d, QuantConv3d)
#: Products with, and sums of, stored numbers: exporters fold them into the convolution.
_AFFINE = frozenset(["mul", "add"])


def decide_outputs(
    model: nn.Module, decisions: tuple[Decision, ...], example: Any
) -> list[Decision]:
    """Return the decisions about convolutions whose result needs a quantizer, with its descriptor.

    Before: the model is quantized, and some results of quantized convolutions are read by
    operators that quantize nothing. After: these decisions have an ``output``; it is unsigned
    where a ReLU alone reads the result. Results that the model returns, or that a layer reads which
    stays float, are left alone. So are depthwise convolutions in front of a norm, say: their float
    kernel is the faster one there.
    """
    chosen = [d for d in decisions if _may_have_output(d)]
    if not chosen:
        return []
    flow = record(model, example, is_leaf)
    found = []
    for decision in chosen:
        calls = flow.calls_of(decision.module)
        needs = [_Readers(flow, call) for call in calls]
        kept = any(n.returned or n.behind_norm for n in needs)
        if any(n.in_float for n in needs) and not kept:
            assert decision.input is not None
            unsigned = all(n.after_relu for n in needs) and isinstance(decision.input.num_bits, int)
            if is_depthwise(decision.module) and not unsigned:
                continue
            output = decision.input.replace(name=None, unsigned=unsigned)
            found.append(replace(decision, output=output))
    return found


def _may_have_output(decision: Decision) -> bool:
    module = decision.module
    return (
        not decision.reason
        and decision.input is not None
        and decision.weight is not None
        and isinstance(module, _CONVOLUTIONS)
    )


class _Readers:
    """What reads the result of one call of a convolution.

    Attributes:
        in_float: something other than a quantizer reads it.
        returned: the model returns it, or a layer that stays float reads it.
        after_relu: a ReLU is all that reads it.
        behind_norm: a BatchNorm reads it, which the exporter folds into the convolution.
    """

    def __init__(self, flow: Flow, call: Call) -> None:
        self._flow = flow
        self.in_float = self.returned = self.behind_norm = False
        self.after_relu = self._is_before_relus(call)
        self._follow(call, moved=False, activated=False)

    def _is_before_relus(self, call: Call) -> bool:
        """Return True if ReLUs are all that reads a result, also behind what moves elements."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            is_relu(reader) or (moves_elements(reader) and self._is_before_relus(reader))
            for reader in readers
        )

    def _follow(self, call: Call, *, moved: bool, activated: bool) -> None:
        if call.index in self._flow.outputs:
            self.returned = True
        for reader in self._flow.consumers(call):
            if quantizes(reader):
                continue
            if is_float_layer(reader.module):
                self.returned = True
            elif clips(reader):
                self._follow(reader, moved=moved, activated=True)
            elif moves_elements(reader):
                self._follow(reader, moved=True, activated=activated)
            elif pads_with_zeros(reader) and self._is_before_convolutions(reader):
                continue
            elif not moved and not activated and self._is_affine(reader, call):
                self.behind_norm |= isinstance(reader.module, _NORMS)
                self._follow(reader, moved=moved, activated=activated)
            else:
                self.in_float = True

    def _is_before_convolutions(self, call: Call) -> bool:
        """Return True if quantized convolutions are all that reads a result."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            isinstance(reader.module, _CONVOLUTIONS) and quantizes(reader) for reader in readers
        )

    def _is_affine(self, reader: Call, operand: Call) -> bool:
        """Return True for BatchNorm, and the product or sum of a value and stored numbers."""
        others = [i for i in reader.inputs if i != operand.index]
        if isinstance(reader.module, _NORMS):
            return True
        return _operator(reader) in _AFFINE and all(map(self._is_stored, others))

    def _is_stored(self, index: int) -> bool:
        call = self._flow.calls[index]
        return not call.inputs and _has(call, "move")
