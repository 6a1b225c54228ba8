"""The structure that a model has once its BatchNorms are folded, which planning looks at.

``quantize_`` plans an unfolded model as the model that :func:`torchq.fuse_` makes of it, so that
nothing has to be planned again after training. Which BatchNorms these are is the rule of fusion
itself: see :mod:`torchq.fusion.pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from torchq.descriptor import QuantDescriptor
from torchq.fusion.modules import is_norm
from torchq.fusion.pairs import Pair, find_flow, find_pairs
from torchq.fusion.unfolded import keeps_norm
from torchq.graph import Flow
from torchq.nn import QuantModule, TensorQuantizer, quantized_class, switched_off
from torchq.nn.batchnorm_folding import OutputScaling
from torchq.swap.apply import class_name
from torchq.utils import modules_with_names, untouched


@dataclass(frozen=True)
class FoldingNorm:
    """A BatchNorm that will be folded into the layer in front of it.

    Attributes:
        names: every path of it.
        cls: the qualified name of its class.
        may_quantize_output: its result can have a quantizer while it is there.
    """

    names: tuple[str, ...]
    cls: str
    may_quantize_output: bool


def folding_pairs(
    model: nn.Module, example: object, recorded: Flow | None = None
) -> list[Pair]:
    """Return the BatchNorms that ``fuse_`` will fold, each with its layers.

    Whether they train now does not matter, as they are folded in eval mode.

    Args:
        model: float, or quantized; left unchanged.
        example: as for :func:`torchq.fuse_`.
        recorded: as for :func:`torchq.fusion.pairs.find_flow`.
    """
    if not any(map(is_norm, model.modules())):
        return []
    quantizers = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    with switched_off(quantizers), untouched(model):
        try:
            flow, _ = find_flow(model, example, recorded)
        except Exception:  # fuse_ will say that it cannot follow the model
            return []
        pairs, _ = find_pairs(model, flow)
    return [pair for pair in pairs if _stays_foldable(model, pair)]


def _stays_foldable(model: nn.Module, pair: Pair) -> bool:
    """Return False where fusion refused the numbers, or a calibrated weight takes no factors."""
    layers = [model.get_submodule(path) for path in pair.layers]
    if not pair.before and keeps_norm(layers[0]):
        return False
    return not any(
        isinstance(layer, OutputScaling) and layer.weight_grid_obstacle()
        for layer in layers
    )


def norms_behind_layers(model: nn.Module, pairs: list[Pair]) -> dict[str, FoldingNorm]:
    """Return path of a layer -> the BatchNorm behind it that will be folded into it."""
    names_of = {id(module): names for names, module in modules_with_names(model)}
    norms = {}
    for pair in pairs:
        if not pair.before:
            norm = model.get_submodule(pair.norm)
            may_quantize = not isinstance(norm, QuantModule)
            may_quantize &= quantized_class(type(norm)) is not None
            norms[pair.layers[0]] = FoldingNorm(
                names_of[id(norm)], class_name(norm), may_quantize
            )
    return norms


def narrow_weights_(model: nn.Module, example: object) -> dict[str, QuantDescriptor]:
    """Leave the lowest code out of weights that a BatchNorm follows, in place.

    That code has no counterpart of the other sign, which a negative factor of the BatchNorm would
    turn it into. The scale stays what it is.

    Args:
        model: quantized, before calibration.
        example: as for :func:`folding_pairs`.

    Returns:
        Path of each layer -> how its weight is quantized now.
    """
    changed = {}
    for pair in folding_pairs(model, example):
        layer = model.get_submodule(pair.layers[0])
        quantizer = getattr(layer, "weight_quantizer", None)
        if pair.before or not isinstance(quantizer, TensorQuantizer):
            continue
        d = quantizer.descriptor
        if isinstance(d.num_bits, int) and d.symmetric and not d.unsigned:
            quantizer.descriptor = d.replace(narrow_range=True)
            changed[pair.layers[0]] = quantizer.descriptor
    return changed


def without_norms(flow: Flow, norms: Mapping[int, str]) -> Flow:
    """Return a flow in which what reads a BatchNorm reads what the BatchNorm reads.

    Args:
        flow: of the model with its BatchNorms.
        norms: id and path of each BatchNorm to leave out. One whose forward is not one call is
            left out where it calls ``batch_norm``.
    """
    paths = frozenset(norms.values())
    sources: dict[int, int] = {}
    calls = []
    for call in flow.calls:
        inputs = tuple(sources.get(index, index) for index in call.inputs)
        operands = tuple(sources.get(index, index) for index in call.operands)
        is_inside = (
            call.module is None and call.name == "batch_norm" and call.inside in paths
        )
        if inputs and (id(call.module) in norms or is_inside):
            sources[call.index] = inputs[0]
            inputs = ()
        calls.append(replace(call, inputs=inputs, operands=operands))
    outputs = frozenset(sources.get(index, index) for index in flow.outputs)
    return replace(flow, calls=tuple(calls), outputs=outputs)
