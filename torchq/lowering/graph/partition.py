"""The parts of a model that can be traced, each replaced by one graph of fused layers."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from torchq.graph import forward_hook_kind, is_torch_leaf, trace_or_none
from torchq.lowering.graph.traced_module import TracedModel
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.product_call import ProductCall
from torchq.lowering.passes import run_passes
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import modules_with_names, set_submodule

#: The layers of torchq that stay single calls.
_LAYERS = (Int8Layer, DeployedMultiheadAttention, ProductCall, TensorQuantizer)


def fuse_layers(model: nn.Module, careful: bool) -> nn.Module:
    """Return what to use instead of ``model``, whose integer layers are fused where it is traced.

    What cannot be traced is changed in place: it keeps its own forward, and its children are traced
    one by one; where ``careful``, not those that this forward may index, or call in other ways.
    """
    fused = _fused(model) if _is_worth_tracing(model) else None
    return _with_fused_children(model, careful) if fused is None else fused


def _with_fused_children(model: nn.Module, careful: bool) -> nn.Module:
    for name, child in list(model.named_children()):
        if not _is_leaf(child):
            kept = careful and _may_be_taken_apart(child)
            setattr(model, name, (_with_fused_children if kept else fuse_layers)(child, careful))
    return model


def _fused(model: nn.Module) -> nn.Module | None:
    """Return ``model`` as one graph of fused layers; None if its forward cannot be traced."""
    graph = trace_or_none(model, _is_leaf)
    if graph is None:
        return None
    for names, layer in list(modules_with_names(graph)):
        if isinstance(layer, Int8Layer):  # passes change it, and it may stand elsewhere too
            variant = layer.variant()
            for name in names:
                set_submodule(graph, name, variant)
    run_passes(graph, _dtype(model))
    return TracedModel.of(graph, model)


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
    return isinstance(module, _LAYERS) or is_torch_leaf(module)


def _is_worth_tracing(model: nn.Module) -> bool:
    """Return True if ``model`` holds integer layers and no forward hook would be lost."""
    if _is_leaf(model) or not any(isinstance(m, Int8Layer) for m in model.modules()):
        return False
    return not any(forward_hook_kind(m) for m in model.modules())


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the floating-point results of the integer layers."""
    return next(m.dtype for m in model.modules() if isinstance(m, Int8Layer))
