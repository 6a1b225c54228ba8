"""Passes that rewrite a graph for inference. The model that a graph was made of stays as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchq.graph.facade.graph import Graph, graph_pass

__all__ = ["constant_fold", "dce", "remove_identity", "simplify_inference"]

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_DROPOUT_FUNCTIONS = (nn.functional.dropout, torch.dropout)
#: Dimensions of what a BatchNorm reads behind the channels.
_SPATIAL: dict[type, int] = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
#: The largest constant, in elements, that replaces its computation.
_MAX_FOLDED = 2**26


def _rewritten(graph: Graph, rewrite: Callable[[fx.GraphModule], None]) -> Graph:
    """Return a graph after a change to a copy, which shares modules and weights."""
    module = fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
    rewrite(module)
    module.graph.lint()
    return graph.with_module(fx.GraphModule(module, module.graph))


def _bypass(module: fx.GraphModule, drops: Callable[[fx.Node], bool]) -> None:
    """Let the readers of some nodes read the first input of these nodes instead."""
    for node in list(module.graph.nodes):
        if drops(node) and node.args and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _called(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


@graph_pass()
def remove_identity(graph: Graph) -> Graph:
    """Remove calls of nn.Identity.

    Before::

        x -> Identity -> reader

    After::

        x -> reader
    """

    def rewrite(module: fx.GraphModule) -> None:
        _bypass(module, lambda node: type(_called(module, node)) is nn.Identity)

    return _rewritten(graph, rewrite)


@graph_pass()
def simplify_inference(graph: Graph) -> Graph:
    """Remove dropout, and write each BatchNorm with fixed statistics as its scale and shift.

    Before::

        x -> Dropout -> BatchNorm -> reader

    After::

        x -> mul(scale) -> add(shift) -> reader
    """

    def rewrite(module: fx.GraphModule) -> None:
        _bypass(module, lambda node: _is_dropout(module, node))
        for node in list(module.graph.nodes):
            norm = _called(module, node)
            # BatchNorm1d takes two forms of input, so it stays.
            spatial = _SPATIAL.get(type(norm), 0)
            if isinstance(norm, _BatchNorm) and norm.running_mean is not None and spatial:
                _write_scale_and_shift(module, node, norm, spatial)

    return _rewritten(graph, rewrite)


def _is_dropout(module: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_function" and node.target in _DROPOUT_FUNCTIONS:
        return True
    return type(_called(module, node)) in _DROPOUTS


def _write_scale_and_shift(
    module: fx.GraphModule, node: fx.Node, norm: _BatchNorm, spatial: int
) -> None:
    """Replace the call of a BatchNorm of images or volumes."""
    assert norm.running_mean is not None and norm.running_var is not None
    with torch.no_grad():
        # In float64, so that the two numbers are rounded once.
        scale = (norm.running_var.double() + norm.eps).rsqrt()
        scale = scale if norm.weight is None else scale * norm.weight.double()
        shift = -norm.running_mean.double() * scale
        shift = shift if norm.bias is None else shift + norm.bias.double()
    kept = [part.to(norm.running_mean.dtype).view(-1, *[1] * spatial) for part in (scale, shift)]
    with module.graph.inserting_before(node):
        names = [f"{node.name}_scale", f"{node.name}_shift"]
        parts = [_constant(module, name, part) for name, part in zip(names, kept, strict=True)]
        product = module.graph.call_function(torch.mul, (node.args[0], parts[0]))
        node.replace_all_uses_with(module.graph.call_function(torch.add, (product, parts[1])))
    module.graph.erase_node(node)


def _constant(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    """Return a node that reads a new buffer."""
    free, count = name, 0
    while hasattr(module, free):
        count += 1
        free = f"{name}_{count}"
    module.register_buffer(free, value)
    return module.graph.get_attr(free)


@graph_pass()
def constant_fold(graph: Graph) -> Graph:
    """Compute once what depends on no input. Parameters count as constants.

    Before::

        weight -> transpose -> reader

    After::

        constant -> reader
    """

    def rewrite(module: fx.GraphModule) -> None:
        known: dict[fx.Node, object] = {}
        runner = fx.Interpreter(module, garbage_collect_values=False)
        runner.env = known
        for node in module.graph.nodes:
            constant = node.op == "get_attr" or all(n in known for n in node.all_input_nodes)
            if node.op in ("placeholder", "output") or not constant or _is_random(node):
                continue
            with torch.no_grad():
                known[node] = runner.run_node(node)
        for node in list(module.graph.nodes):
            value = known.get(node)
            read = any(user not in known for user in node.users)
            small = isinstance(value, Tensor) and value.numel() <= _MAX_FOLDED
            if node.op != "get_attr" and read and small and isinstance(value, Tensor):
                with module.graph.inserting_before(node):
                    node.replace_all_uses_with(_constant(module, f"{node.name}_value", value))
        module.graph.eliminate_dead_code()

    return _rewritten(graph, rewrite)


def _is_random(node: fx.Node) -> bool:
    """Return True for an operator whose results differ from call to call, or that changes state."""
    tags = getattr(node.target, "tags", ())
    name = str(getattr(node.target, "__name__", node.target))
    random = torch.Tag.nondeterministic_seeded in tags or "rand" in name or "dropout" in name
    return random or node.is_impure() or node.op == "call_module"


@graph_pass()
def dce(graph: Graph) -> Graph:
    """Remove what no output needs: nodes, and the modules and tensors that they named.

    Before: any graph.
    After: each node is read, and each module and tensor is named by a node.
    """

    def rewrite(module: fx.GraphModule) -> None:
        module.graph.eliminate_dead_code()

    return _rewritten(graph, rewrite)
