"""Modules whose calls stay whole while torch.export writes the rest of a model as operators.

A module says so by an attribute ``keeps_tensor_type`` that is True: it is called with one tensor
and returns one of the same shape, element type and device. Quantizers do, so that their calls can
be told from arithmetic in a trace of either kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, fx, nn

from torchq.graph.tracing import forward_hook_kind

__all__ = ["opaque_calls", "restore_calls"]

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define("call_whole(Tensor x, str path) -> Tensor")


def _fake_call(x: Tensor, path: str) -> Tensor:
    """Return what a module that keeps the type of tensors returns, without its elements."""
    return torch.empty_like(x)


torch.library.register_fake("torchq::call_whole", _fake_call, lib=_LIBRARY)


@contextmanager
def opaque_calls(model: nn.Module) -> Iterator[None]:
    """Let the modules that stay whole write one operator with their path while they are exported.

    Args:
        model: not run with real tensors meanwhile. Modules with hooks are traced as usual, since a
            call of the trace would run the hooks again.
    """
    chosen = [
        (path, module)
        for path, module in model.named_modules()
        if getattr(module, "keeps_tensor_type", False) and forward_hook_kind(module) is None
    ]
    try:
        for path, module in chosen:
            vars(module)["forward"] = partial(_opaque, path)
        yield
    finally:
        for _, module in chosen:
            del vars(module)["forward"]


def _opaque(path: str, x: Tensor) -> Tensor:
    return torch.ops.torchq.call_whole(x, path)


def restore_calls(traced: fx.GraphModule, model: nn.Module) -> None:
    """Write calls of the modules of ``model`` in the place of the operators that stand for them.

    Args:
        traced: changed in place. What it names by the paths of these modules are the modules of
            ``model`` themselves.
        model: what was traced within :func:`opaque_calls`.
    """
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.torchq.call_whole.default:
            continue
        x, path = node.args
        traced.add_submodule(path, model.get_submodule(path))
        with traced.graph.inserting_before(node):
            call = traced.graph.call_module(path, (x,))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        traced.graph.erase_node(node)
