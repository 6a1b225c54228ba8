"""The trace of a whole model: at module level where torch.fx can follow it, else of operators."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from torchq.errors import GraphError
from torchq.graph.calling import call_arguments, tensors_in
from torchq.graph.tracing import forward_hook_kind, state_kept, trace_modules
from torchq.graph.whole_calls import opaque_calls, restore_calls
from torchq.utils import evaluating

__all__ = ["Trace", "trace"]

_GUARDS = "_guards_fn"


@dataclass(frozen=True)
class Trace:
    """A traced model.

    Attributes:
        graph_module: the trace. At module level it calls the modules of the model, not copies.
        level: ``"module"``: calls of modules, traced with torch.fx. ``"aten"``: calls of ATen
            operators on the parameters of the model, traced with torch.export; quantizers alone
            stay calls of modules.
        lost: sentences that say what the model does and the trace does not.
    """

    graph_module: fx.GraphModule
    level: Literal["module", "aten"]
    lost: tuple[str, ...]


def trace(model: nn.Module, example: Any) -> Trace:
    """Trace ``model`` in eval mode, with torch.fx if possible and with torch.export otherwise.

    A trace of torch.fx counts only if it gives the results of the model on ``example``, bit for
    bit: code that asks for the type of an argument takes another branch while it is traced. So the
    model and the trace run once each, from the same state of the random number generators.

    Args:
        model: left unchanged, with its training modes and its buffers.
        example: the arguments of one call; see :func:`call_arguments`.

    Returns:
        The trace, with its level and what it lost.

    Raises:
        ConfigError: ``example`` does not tell which arguments it holds.
        GraphError: Neither torch.fx nor torch.export can trace the model.

    Example:
        >>> found = trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))
        >>> found.level, [node.name for node in found.graph_module.graph.nodes]
        ('module', ['input_1', '_0', 'output'])
    """
    args, kwargs = call_arguments(model, example)
    try:
        return _with_fx(model, args, kwargs)
    except Exception as error:  # code whose control flow looks at a tensor may raise anything
        reason = f"{type(error).__name__}: {_first_line(error)}"
    try:
        return _with_export(model, args, kwargs, reason)
    except Exception as error:
        raise GraphError(
            f"trace: got a {type(model).__name__} that torch.fx cannot follow ({reason}) and "
            f"torch.export cannot either ({type(error).__name__}: {_first_line(error)}). "
            "Trace the parts of the model that hold no such code"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _with_fx(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    given = _by_name(model, args, kwargs)
    found = trace_modules(model, given=given, record_lines=True)
    with torch.no_grad(), evaluating(model), state_kept(model), torch.random.fork_rng():
        expected = model(*_copied(args), **_copied(kwargs))
    with torch.no_grad(), evaluating(model), state_kept(model), torch.random.fork_rng():
        got = found(*_copied(args), **_copied(kwargs))
    if not _equal(got, expected):
        raise GraphError("the trace computes something else than the model")
    lost = ["Branches that the model takes in training are not in the graph."]
    hooks = forward_hook_kind(model)
    if hooks is not None:
        lost.append(f"The model itself has {hooks}, which is not in the graph.")
    for node in found.graph.nodes:
        if node.op == "placeholder" and node.name != node.target and node.args:
            value = given.get(node.target, node.args[0])
            lost.append(f"Argument {node.target!r} is always {value!r}: other values are refused.")
    return Trace(found, "module", tuple(lost))


def _with_export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> Trace:
    with torch.no_grad(), evaluating(model), state_kept(model), opaque_calls(model):
        program = torch.export.export(model, _copied(args), _copied(kwargs), strict=False)
        found = program.module()
    assert isinstance(found, fx.GraphModule)
    restore_calls(found, model)
    for node in list(found.graph.nodes):
        if node.op == "call_module" and node.target == _GUARDS:
            found.graph.erase_node(node)
            found.delete_submodule(_GUARDS)
    found.graph.eliminate_dead_code()
    found.recompile()
    lost = (
        f"Calls of modules are calls of operators, as torch.fx cannot follow the code ({reason}).",
        "Sizes are those of the example, and inputs of other sizes are not refused.",
        "Branches that the model takes in training are not in the graph.",
    )
    return Trace(found, "aten", lost)


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of their parameters."""
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    return dict(list(bound.arguments.items())[1:])


def _copied(value: Any) -> Any:
    """Return ``value`` with copies of its tensors: a forward may change its arguments."""
    return fx.node.map_aggregate(value, lambda v: v.clone() if isinstance(v, Tensor) else v)


def _equal(got: Any, expected: Any) -> bool:
    ours, theirs = list(tensors_in(got)), list(tensors_in(expected))
    if len(ours) != len(theirs):
        return False
    return all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(ours, theirs, strict=True)
    )
