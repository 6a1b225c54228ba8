"""Finding what can be traced, and joining the integer layers in it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import fx, nn

from torchq.deployment.attention import DeployedMultiheadAttention
from torchq.deployment.base import Int8Layer
from torchq.deployment.rewrite import Rewriter
from torchq.graph.core import is_torch_leaf, observed, trace
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import modules_with_names, set_submodule

__all__ = ["chain"]

log = logging.getLogger(__name__)


def chain(model: nn.Module, accepted: Callable[[], bool] | None = None) -> nn.Module:
    """Join the integer layers of ``model`` as far as it can be traced; returns the model to use instead.

    What cannot be traced keeps its own code, and its children are tried one by one.

    Args:
        model: changed in place where it cannot be traced.
        accepted: whether the whole model still works with a part joined; a part that fails keeps its own code too. Code around a part
            may do more than call it with its defaults.
    """
    if not _worth_it(model):
        return model
    try:
        traced = trace(model, _is_leaf)
    except Exception as error:  # a model's own code may raise anything when its control flow looks at a tensor
        log.debug("deploy: %s cannot be traced (%s: %s); trying its parts", type(model).__name__, type(error).__name__, error)
        _chain_parts(model, accepted)
        return model
    for names, layer in list(modules_with_names(traced)):
        if isinstance(layer, Int8Layer):  # joining changes it, and it may stand elsewhere too
            variant = layer.variant()
            for name in names:
                set_submodule(traced, name, variant)
    Rewriter(traced, _dtype(model)).run()
    return _dressed(traced, model)


def _chain_parts(model: nn.Module, accepted: Callable[[], bool] | None) -> None:
    for name, child in list(model.named_children()):
        if _is_leaf(child):
            continue
        joined = chain(child, accepted)
        setattr(model, name, joined)
        if accepted is not None and joined is not child and not accepted():
            log.debug("deploy: %s of %s keeps its own code; trying its parts", name, type(model).__name__)
            setattr(model, name, child)
            _chain_parts(child, accepted)


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, QuantModule):
        return not module.is_container
    return isinstance(module, (Int8Layer, DeployedMultiheadAttention, TensorQuantizer)) or is_torch_leaf(module)


def _worth_it(model: nn.Module) -> bool:
    """Whether ``model`` holds integer layers, and is used by calling it only."""
    if _is_leaf(model) or not any(isinstance(m, Int8Layer) for m in model.modules()):
        return False
    return not any(observed(m) for m in model.modules())


def _dtype(model: nn.Module) -> torch.dtype:
    return next((m.dtype for m in model.modules() if isinstance(m, Int8Layer)), torch.float32)


def _dressed(traced: fx.GraphModule, model: nn.Module) -> nn.Module:
    """The traced model under the name of the original, with its plain attributes: a parent may read them."""
    graph = fx.Graph()  # one that does not name the tracer: unpickling would look for it
    graph.output(graph.graph_copy(traced.graph, {}))
    for node in graph.nodes:
        node.type = None  # annotations, perhaps as strings; torch 2.6 cannot pickle those
    result = fx.GraphModule(traced, graph, class_name=type(model).__name__)
    for name, value in vars(model).items():
        if not name.startswith("_") and not hasattr(result, name):
            setattr(result, name, value)
    return result.eval()
