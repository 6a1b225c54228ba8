"""The parts of a model that can be traced, each replaced by one graph of fused layers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

import torch
from torch import fx, nn

from torchq.graph import forward_hook_kind, is_torch_leaf, trace_or_culprit
from torchq.lowering.graph.traced_module import TracedModel
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.product_call import ProductCall
from torchq.lowering.passes import run_passes
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import modules_with_names, set_submodule

__all__ = ["Check", "fuse_layers"]

log = logging.getLogger(__name__)

#: A function that runs a model on the example and returns what is wrong with its results; an
#: empty string if they agree with the simulation. It raises what the model raises.
Check = Callable[[nn.Module], str]

#: The layers of torchq that stay single calls.
_LAYERS = (
    Int8Layer,
    DeployedMultiheadAttention,
    ProductCall,
)
#: Where torch defines the classes that compute nothing themselves.
_CONTAINERS = ("torch.nn.modules.module", "torch.nn.modules.container")


def fuse_layers(model: nn.Module, check: Check | None = None) -> nn.Module:
    """Fuse the integer layers of ``model`` as far as it can be traced.

    What cannot be traced keeps its own forward, and its children are tried one by one.

    Args:
        model: with integer layers; changed in place where it cannot be traced.
        check: decides whether the model still works with a part replaced by a graph; a part that
            fails keeps its own forward too. Code around a part may do more than call it. With a
            check, what cannot be traced is also called from the graph of the rest.

    Returns:
        The model to use instead of ``model``.
    """
    fused, opaque = _fused(model, check)
    if fused is None or not _acceptable_whole(fused, bool(opaque), check):
        _fuse_children(model, model, check)
        return model
    for part in opaque:
        _fuse_children(model, part, check)
    return fused


def _acceptable_whole(fused: nn.Module, has_opaque_parts: bool, check: Check | None) -> bool:
    """Return True if the graph of the whole model may be used.

    A complete graph that gives wrong results is accepted: the caller compares once more and
    raises an error, as tracing must not change what a model computes.
    """
    problem = "" if check is None else _problem(fused, check)
    return problem == "" or (problem is not None and not has_opaque_parts)


def _problem(model: nn.Module, check: Check) -> str | None:
    """Return what is wrong with the results of ``model``; None if it raises."""
    try:
        problem = check(model)
    except Exception as error:  # the model's own code, which may read anything of its parts
        log.debug("deploy: %s: %s", type(error).__name__, error)
        return None
    if problem:
        log.debug("deploy: %s", problem)
    return problem


def _fuse_children(root: nn.Module, model: nn.Module, check: Check | None) -> None:
    """Fuse each child of ``model``, a part of ``root`` that keeps its own forward.

    That forward may index or slice a Sequential, and call a child with other arguments than those
    that a trace fixes. Only a check can tell, so without one such children stay what they are,
    and their own children are fused.
    """
    for name, child in list(model.named_children()):
        if _is_leaf(child):
            continue
        fused, opaque = None, set[nn.Module]()
        if check is not None or not _may_be_taken_apart(child):
            fused, opaque = _fused(child, check)
        if fused is not None:
            setattr(model, name, fused)
            if check is not None and _problem(root, check) != "":
                kind = type(model).__name__
                log.debug("deploy: %s of %s keeps its forward; trying its parts", name, kind)
                setattr(model, name, child)
                fused = None
        for part in {child} if fused is None else opaque:
            _fuse_children(root, part, check)


def _fused(model: nn.Module, check: Check | None) -> tuple[nn.Module | None, set[nn.Module]]:
    """Return ``model`` as one graph of fused layers, and the parts that it calls as they are.

    The graph is None if the forward of ``model`` cannot be traced.
    """
    opaque = set[nn.Module]()
    if not _is_worth_tracing(model):
        return None, opaque
    graph = _traced(model, None if check is None else opaque)
    if graph is None:
        return None, opaque
    for names, layer in list(modules_with_names(graph)):
        if isinstance(layer, Int8Layer):  # passes change it, and it may stand elsewhere too
            variant = layer.variant()
            for name in names:
                set_submodule(graph, name, variant)
    run_passes(graph, _dtype(model))
    return TracedModel.of(graph, model), opaque


def _traced(model: nn.Module, opaque: set[nn.Module] | None) -> fx.GraphModule | None:
    """Return ``model`` traced, or None.

    Args:
        model: left unchanged.
        opaque: receives the parts that cannot be traced and are called as they are. None: every
            part must be traced.
    """
    if opaque is None:
        found = trace_or_culprit(model, _is_leaf)
        return found if isinstance(found, fx.GraphModule) else None
    while True:
        found = trace_or_culprit(
            model, lambda m: m in opaque or _is_layer(m), assume_no_varargs=True
        )
        if isinstance(found, fx.GraphModule):
            return found
        # What stops at one block of a network stops at the others too.
        alike = {m for m in model.modules() if type(m) is type(found) and m is not model}
        if found is model or alike <= opaque:
            return None
        opaque.update(alike)


def _may_be_taken_apart(module: nn.Module) -> bool:
    """Return True if code around ``module`` may do more than call it with its defaults."""
    if isinstance(module, (nn.Sequential, torch.jit.ScriptModule)):
        return True
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(p.default is None or isinstance(p.default, (bool, int, float)) for p in parameters)


def _is_leaf(module: nn.Module) -> bool:
    """Return True if ``module`` stays a single call: a layer, or foreign code without layers."""
    if isinstance(module, QuantModule):
        return not module.is_container
    return _is_layer(module) or is_torch_leaf(module)


def _is_layer(module: nn.Module) -> bool:
    """Return True if ``module`` is a layer of torch or torchq, or derived from one."""
    if isinstance(module, QuantModule):
        return not module.is_container
    if isinstance(module, (*_LAYERS, TensorQuantizer, TracedModel)):
        return True
    bases = (cls.__module__ for cls in type(module).__mro__)
    return is_torch_leaf(module) and any(
        base.startswith(("torch.nn.", "torchq.")) and base not in _CONTAINERS for base in bases
    )


def _is_worth_tracing(model: nn.Module) -> bool:
    """Return True if ``model`` holds integer layers and no forward hook would be lost."""
    if _is_leaf(model) or not any(isinstance(m, Int8Layer) for m in model.modules()):
        return False
    return not any(forward_hook_kind(m) for m in model.modules())


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the floating-point results of the integer layers."""
    return next((m.dtype for m in model.modules() if isinstance(m, Int8Layer)), torch.float32)
