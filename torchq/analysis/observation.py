"""What a few batches show: which quantizers are called, on what, and who feeds whom."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.analysis.layers import passing
from torchq.fusion.modules import is_layer, is_norm
from torchq.graph import Call, Flow, is_torch_leaf, record
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import untouched, watching


@dataclass
class Observation:
    """What was seen of quantizers, by their ids, and of modules, by their paths."""

    example: Any  # the first batch
    batches: int = 0
    reached: set[int] = field(default_factory=set)
    not_finite: set[int] = field(default_factory=set)  # given NaN or infinity by the float model
    # Adding a quantized tensor to one that is neither quantized nor the result of a layer.
    one_sided: list[str] = field(default_factory=list)
    norms: dict[str, str] = field(default_factory=dict)  # BatchNorm -> the layer before it

    def note(self, quantizer: TensorQuantizer, args: Any, kwargs: Any, _: None) -> None:
        """Note a call of a quantizer by the float model."""
        self.reached.add(id(quantizer))
        if not bool(torch.isfinite(args[0]).all()):
            self.not_finite.add(id(quantizer))


def observe(
    model: nn.Module,
    known: dict[str, TensorQuantizer],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
) -> Observation | None:
    """Run ``model`` in float on batches and return what was seen; None without any batch.

    Who feeds whom is read from one more run of the first batch, with the quantizers as they are.
    """
    found: Observation | None = None
    with untouched(model):
        for batch in batches:
            if found is None:
                found = Observation(batch)
                _follow(model, found, run)
            notes = [(quantizer, partial(found.note, quantizer)) for quantizer in known.values()]
            with passing(known.values()), watching(notes, before=True):
                run(batch)
            found.batches += 1
    return found


_ADDITIONS = frozenset(["add", "add_", "__add__", "__iadd__", "__radd__"])
_NORM = nn.modules.batchnorm._BatchNorm


def _follow(model: nn.Module, found: Observation, run: Callable[[Any], Any]) -> None:
    """Run the first batch and note additions and BatchNorms."""
    flow = record(model, found.example, _is_leaf, forward=lambda _, batch: run(batch))
    for call in flow.calls:
        makers = [_maker(flow, flow.calls[index]) for index in call.inputs]
        if isinstance(call.module, _NORM) and makers and makers[0].module is not None:
            found.norms[call.name] = makers[0].name
        shapes = {maker.shape for maker in makers} | {call.shape}
        if call.name not in _ADDITIONS or len(shapes) != 1 or len(call.shape or ()) < 2:
            continue
        quantized = [isinstance(m.module, TensorQuantizer) for m in makers]
        # An operand that no call made is one of the model's own.
        others = [m.module for m in makers if not isinstance(m.module, TensorQuantizer)]
        if sum(quantized) == 1 and not (call.arguments or any(map(_is_linear, others))):
            found.one_sided.append(call.inside)


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, QuantModule):
        return not module.is_container and bool(module.slots())
    return isinstance(module, TensorQuantizer) or is_torch_leaf(module)


def _maker(flow: Flow, call: Call) -> Call:
    """Return what made the result of a call, behind modules that return their input."""
    module = call.module
    passes = isinstance(module, nn.Identity) or (
        isinstance(module, TensorQuantizer) and not module.quantizing
    )
    return _maker(flow, flow.calls[call.inputs[0]]) if passes and call.inputs else call


def _is_linear(module: nn.Module | None) -> bool:
    """Return True for a layer or BatchNorm, into which an addition is fused."""
    return is_layer(module) or is_norm(module)
