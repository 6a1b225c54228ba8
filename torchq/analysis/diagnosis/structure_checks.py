"""Checks of what is quantized and what is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from torchq.analysis.diagnosis.finding import Finding
from torchq.analysis.diagnosis.registry import Patient, check
from torchq.analysis.layers import channel_axes
from torchq.fusion.channel_ranges import spread_of
from torchq.graph import is_torch_leaf, trace_modules
from torchq.nn import QuantModule, TensorQuantizer, find_calls, quantized_as

__all__ = ["SPREAD"]

#: Largest over median channel magnitude from which on one scale costs the median channel 4 bits.
SPREAD = 16.0

_BATCHNORM = nn.modules.batchnorm._BatchNorm


def _is_computing(module: nn.Module) -> bool:
    """Return True for a float layer that multiplies with a weight, and that could be quantized."""
    base = quantized_as(type(module))
    weight = getattr(module, "weight", None)
    if base is None or isinstance(module, (QuantModule, nn.Embedding, nn.EmbeddingBag)):
        return False
    return isinstance(weight, torch.Tensor) and weight.dim() > 1


@check("skipped_layer")
def skipped_layer(patient: Patient) -> Iterator[Finding]:
    """Yield layers that stay float beside quantized ones."""
    # Attention quantizes the weight of the layer that it reads without calling it.
    read = {
        id(child)
        for module in patient.model.modules()
        if isinstance(module, QuantModule)
        for child in module.children()
    }
    for path, module in patient.model.named_modules():
        if _is_computing(module) and id(module) not in read:
            count = sum(p.numel() for p in module.parameters(recurse=False))
            text = f"{type(module).__name__} with {count:,} parameters stays float"
            remedy = "torchq.plan(model, config) says why; nothing, if it was excluded on purpose"
            yield Finding("skipped_layer", "info", path, text, remedy)


@check("switched_off")
def switched_off(patient: Patient) -> Iterator[Finding]:
    """Yield quantizers that do nothing."""
    optional = {
        id(getattr(module, f"{slot}_quantizer", None))
        for module in patient.model.modules()
        for slot in getattr(module, "products", ())
    }
    for path, quantizer in patient.quantizers.items():
        # Most recipes leave the matrix products of attention in float.
        by_recipe = id(quantizer) in optional and not quantizer.calibrated
        if quantizer.mode == "off" and not by_recipe:
            text = "is off, so its tensor stays float"
            remedy = f"model.get_submodule({path!r}).mode = 'quantize'"
            yield Finding("switched_off", "info", path, text, remedy)


@check("functional_call", needs_batches=True)
def functional_call(patient: Patient) -> Iterator[Finding]:
    """Yield forwards that call a convolution or linear function with a weight of their own."""
    assert patient.seen is not None
    names = {id(module): path for path, module in patient.model.named_modules()}
    parameters = {id(p): path for path, p in patient.model.named_parameters()}
    for key, found in find_calls(patient.model, patient.seen.example).items():
        module = patient.model.get_submodule(names[key])
        if isinstance(module, (QuantModule, TensorQuantizer)) or quantized_as(type(module)):
            continue
        # Attention has products of data alone; other calls have a weight, or compute one.
        sites = [site for site in found.sites if site.kind != "attention"]
        products = sorted(found.unreached.keys() - {"embedding"})
        kinds = list(dict.fromkeys([site.kind for site in sites] + products))
        if not kinds:
            continue
        text = f"its forward calls {', '.join(kinds)} with a weight that stays float"
        weights = [_joined(names[key], site.weight) for site in sites if site.weight]
        weights += sorted(parameters[source] for source in found.sources)
        if weights:
            text += f" ({', '.join(dict.fromkeys(weights))})"
        remedy = "torchq.quantize_(model, config, example=example)"
        if products or found.obstacle:
            remedy = "let a layer of its own make the call, such as torch.nn.Linear"
        yield Finding("functional_call", "warning", names[key], text, remedy)


@check("one_sided_add", needs_batches=True)
def one_sided_add(patient: Patient) -> Iterator[Finding]:
    """Yield additions with a quantizer on one operand, where the other is no layer's result.

    A runtime adds in integers where both operands have a scale, or where it can fuse the addition
    into the layer that makes the other operand.
    """
    assert patient.seen is not None
    places: dict[str, None] = {}
    for addition in patient.seen.additions:
        first, second = addition.quantized
        if first == second:
            continue
        if not addition.linear[0 if second else 1]:
            places[addition.where] = None
    for path in places:
        text = "adds a quantized operand to one that is not, so the addition runs in float"
        remedy = "torchq.quantize_(model, config, target=..., example=example), or quantize both"
        yield Finding("one_sided_add", "warning", path, text, remedy)


@check("weight_axis")
def weight_axis(patient: Patient) -> Iterator[Finding]:
    """Yield weight quantizers whose ranges do not follow the output channels."""
    paths = {id(quantizer): path for path, quantizer in patient.active.items()}
    known = {id(quantizer): quantizer for quantizer in patient.active.values()}
    for module in patient.model.modules():
        for key, axes in channel_axes(module).items():
            axis = known[key].descriptor.axis if key in known else None
            if axis is None or axis == axes:
                continue
            name = module.float_class.__name__ if isinstance(module, QuantModule) else "its layer"
            text = f"has ranges along axis {axis}; the output channels of {name} are axis {axes}"
            remedy = f"QuantDescriptor(axis={axes}) for its weight, as recipes have"
            yield Finding("weight_axis", "error", paths[key], text, remedy)


@check("range_spread")
def range_spread(patient: Patient) -> Iterator[Finding]:
    """Yield weights with one scale whose channels differ widely, as after merging branches."""
    for path, module in patient.model.named_modules():
        quantizer = getattr(module, "weight_quantizer", None)
        weight = getattr(module, "weight", None)
        if not isinstance(quantizer, TensorQuantizer) or not quantizer.quantizing:
            continue
        if quantizer.descriptor.axis is not None or quantizer.descriptor.block_size is not None:
            continue
        if not isinstance(weight, torch.Tensor) or weight.is_meta or weight.dim() < 2:
            continue
        spread = spread_of(module, weight)
        if spread > SPREAD:
            text = (
                f"its largest channel is {spread:.0f} times the median one, with one scale for all"
            )
            axes = channel_axes(module).get(id(quantizer), (0,))
            remedy = f"weight=QuantDescriptor(axis={axes})"
            remedy += ", or torchq.ptq.equalize_(model, example) before calibration"
            yield Finding(
                "range_spread", "warning", _joined(path, "weight_quantizer"), text, remedy
            )


@check("batchnorm_left")
def batchnorm_left(patient: Patient) -> Iterator[Finding]:
    """Yield BatchNorms behind a quantized layer, which could have been folded into it."""
    pairs = _traced_norms(patient.model) if patient.seen is None else patient.seen.norms
    for path, layer in pairs.items():
        if not isinstance(patient.model.get_submodule(layer), QuantModule):
            continue
        text = f"normalises the output of the quantized {layer}, at the cost of a float operator"
        remedy = "torchq.fuse_(model, example) before torchq.quantize_ and torchq.calibrate"
        yield Finding("batchnorm_left", "warning", path, text, remedy)


def _traced_norms(model: nn.Module) -> dict[str, str]:
    """Return the BatchNorms of a model that can be traced, each with the layer before it."""
    try:
        traced = trace_modules(model, lambda m: isinstance(m, QuantModule) or is_torch_leaf(m))
    except Exception:  # code whose control flow looks at a tensor may raise anything
        return {}
    found = {}
    for node in traced.graph.nodes:
        if node.op != "call_module" or not node.all_input_nodes:
            continue
        before = node.all_input_nodes[0]
        norm = isinstance(model.get_submodule(str(node.target)), _BATCHNORM)
        if norm and before.op == "call_module":
            found[str(node.target)] = str(before.target)
    return found


@check("differing_ranges", needs_batches=True)
def differing_ranges(patient: Patient) -> Iterator[Finding]:
    """Yield quantizers that read one tensor with different ranges."""
    assert patient.seen is not None
    paths = {id(q): path for path, q in patient.quantizers.items()}
    for group in patient.seen.readers:
        chosen = [q for q in group if q.quantizing and q.calibrated and q.amax.numel() == 1]
        formats = {q.descriptor.format.name for q in chosen}
        values = [float(q.amax.detach()) for q in chosen]
        if len(chosen) < 2 or len(formats) > 1 or max(values) <= min(values) * (1 + 1e-6):
            continue
        names = [paths[id(q)] for q in chosen]
        text = "reads the same tensor as " + ", ".join(names[1:])
        text += f", with ranges from {min(values):.4g} to {max(values):.4g}"
        remedy = f"torchq.nn.share_quantizers_(model, {names!r})"
        yield Finding("differing_ranges", "warning", names[0], text, remedy)


def _joined(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
