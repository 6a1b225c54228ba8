"""Finding what can be traced, and joining the integer layers in it."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import fx, nn

from torchq.graph import forward_hook_kind, is_torch_leaf
from torchq.lowering.graph.traced_module import Joined, trace
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.passes.rewrite import Rewriter
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import modules_with_names, set_submodule

__all__ = ["Judge", "chain"]

log = logging.getLogger(__name__)

#: Where torch keeps the classes that compute nothing themselves.
_NO_LAYERS = ("torch.nn.modules.module", "torch.nn.modules.container")


class Judge(Protocol):
    """Compares what takes the place of a model with the simulation, for an example."""

    def runs(self, model: nn.Module) -> bool:
        """Whether it raises nothing."""
        ...

    def accepts(self, model: nn.Module) -> bool:
        """Whether it runs and agrees."""
        ...


def chain(model: nn.Module, judge: Judge | None = None) -> nn.Module:
    """Join the integer layers of ``model`` as far as it can be traced; returns the model to use instead.

    What cannot be traced keeps its own code, and its children are tried one by one.

    Args:
        model: changed in place where it cannot be traced.
        judge: decides whether ``model`` still works with a part joined; a part that fails keeps its own code too. Code around a part
            may do more than call it with its defaults. With a judge, what cannot be traced is also called from the graph of the rest.
    """
    joined, opaque = _joined(model, judge)
    # A whole trace that gives wrong numbers is returned: the caller compares, and says so.
    if joined is None or (
        judge is not None and not (judge.accepts(joined) if opaque else judge.runs(joined))
    ):
        _chain_parts(model, model, judge)
        return model
    for part in opaque:
        _chain_parts(model, part, judge)
    return joined


def _chain_parts(root: nn.Module, model: nn.Module, judge: Judge | None) -> None:
    for name, child in list(model.named_children()):
        if _is_leaf(child):
            continue
        joined, opaque = _joined(child, judge)
        if joined is not None:
            setattr(model, name, joined)
            if judge is not None and not judge.accepts(root):
                log.debug(
                    "deploy: %s of %s keeps its own code; trying its parts",
                    name,
                    type(model).__name__,
                )
                setattr(model, name, child)
                opaque = {child}
        for part in opaque or () if joined is not None else (child,):
            _chain_parts(root, part, judge)


def _joined(model: nn.Module, judge: Judge | None) -> tuple[nn.Module | None, set[nn.Module]]:
    """``model`` as one graph of joined layers, and the parts that it calls as they are; None if its own code cannot be traced."""
    opaque = set[nn.Module]()
    if _is_leaf(model) or not _worth_it(model):
        return None, opaque
    graph = _traced(model, None if judge is None else opaque)
    if graph is None:
        return None, opaque
    for names, layer in list(modules_with_names(graph)):
        if isinstance(layer, Int8Layer):  # joining changes it, and it may stand elsewhere too
            variant = layer.variant()
            for name in names:
                set_submodule(graph, name, variant)
    Rewriter(graph, _dtype(model)).run()
    return Joined.of(graph, model), opaque


def _traced(model: nn.Module, opaque: set[nn.Module] | None) -> fx.GraphModule | None:
    """``model`` traced; ``opaque`` receives the parts that cannot be, which are then called as they are."""
    if opaque is None:
        found = trace(model, _is_leaf)
        return found if isinstance(found, fx.GraphModule) else None
    while not isinstance(
        found := trace(model, lambda m: m in opaque or _is_layer(m), no_rest=True), fx.GraphModule
    ):
        # What stops at one block of a network stops at the others too.
        alike = {m for m in model.modules() if type(m) is type(found) and m is not model}
        if found is model or alike <= opaque:
            return None
        opaque.update(alike)
    return found


def _is_leaf(module: nn.Module) -> bool:
    """Whether to leave ``module`` a single call: a layer, or code of the user's that holds none."""
    if isinstance(module, QuantModule):
        return not module.is_container
    return _is_layer(module) or is_torch_leaf(module)


def _is_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of the layers that rewriting knows, or derived from one of torch's or ours."""
    if isinstance(module, QuantModule):
        return not module.is_container
    if isinstance(module, (Int8Layer, DeployedMultiheadAttention, TensorQuantizer, Joined)):
        return True
    bases = (cls.__module__ for cls in type(module).__mro__)
    return is_torch_leaf(module) and any(
        base.startswith(("torch.nn.", "torchq.")) and base not in _NO_LAYERS for base in bases
    )


def _worth_it(model: nn.Module) -> bool:
    """Whether ``model`` holds integer layers, and is used by calling it only."""
    if _is_leaf(model) or not any(isinstance(m, Int8Layer) for m in model.modules()):
        return False
    return not any(forward_hook_kind(m) for m in model.modules())


def _dtype(model: nn.Module) -> torch.dtype:
    return next((m.dtype for m in model.modules() if isinstance(m, Int8Layer)), torch.float32)
