"""Modules whose own operators (``+``, ``torch.cat``, ...) are calls of child modules.

Quantizers can sit in such children. The forward of the module's class is traced with all children
kept whole, once for training and once for evaluation. Chosen operators become calls of new
children, and the result runs in the place of the class's forward. The module object, its children,
hooks and parameters stay, as with every conversion (:mod:`torchq.nn.convert`). No function or
method of torch is patched.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

from torch import fx, nn

from torchq.errors import QuantizationError
from torchq.graph import ForwardTracer, trace_call
from torchq.nn.convert import QuantModule, change_class
from torchq.nn.modules.operators import OPERATORS, Tap
from torchq.utils import qualified_name

__all__ = [
    "RewrittenForward",
    "replace_operators_",
    "replace_recorded_operators_",
    "trace_forward",
]


class RewrittenForward(QuantModule):
    """Base of the classes that :func:`replace_operators_` makes, one for each float class.

    Attributes:
        replacements: Node of the traced forward -> name of the child that is called instead.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True
    #: The class's own forward, under a name that the tracer can ask for.
    float_forward: ClassVar[Callable[..., Any]]

    replacements: Mapping[str, str]

    def replacement_record(self) -> dict[str, Any]:
        """Return what :func:`replace_recorded_operators_` needs, as JSON data."""
        kinds = {}
        for child in self.replacements.values():
            module = self.get_submodule(child)
            cls = type(module).float_class if isinstance(module, QuantModule) else type(module)
            kinds[child] = cls.__name__
        return {
            "class": qualified_name(type(self).float_class),
            "nodes": dict(self.replacements),
            "children": kinds,
        }

    def _compile(self) -> None:
        self._eval_run, self._train_run = (
            _rewritten(self, self.replacements, training) for training in (False, True)
        )

    def on_revert(self) -> None:
        """Remove the children and the rewritten code."""
        for child in self.replacements.values():
            delattr(self, child)
        for name in ("replacements", "_eval_run", "_train_run"):
            delattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time and the functions by exec: a copy makes them again.
        state = {
            name: value
            for name, value in vars(self).items()
            if name not in ("_eval_run", "_train_run")
        }
        return _blank, (type(self).float_class,), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._compile()


@cache
def _twin(cls: type[Any]) -> type[RewrittenForward]:
    """Return the class for modules of a float class: one for each, so types of copies are equal."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (self._train_run if self.training else self._eval_run)(self, *args, **kwargs)

    # Exporters ask for the names of arguments, and torch.fx looks for them in the wrapped code.
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    body = {
        "float_class": cls,
        "float_forward": cls.forward,
        "forward": forward,
        "__doc__": f":class:`{qualified_name(cls)}` with operators replaced by child modules.",
        "__module__": cls.__module__,
    }
    return types.new_class(
        f"Rewritten{cls.__name__}", (RewrittenForward, cls), {}, lambda space: space.update(body)
    )


def _blank(cls: type[nn.Module]) -> RewrittenForward:
    twin: type[RewrittenForward] = _twin(cls)  # type: ignore[arg-type]
    return twin.__new__(twin)


class _ShallowTracer(ForwardTracer):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.traced_func_name = function

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(module: nn.Module, training: bool) -> fx.Graph:
    """Return the graph of the module's own forward, with its children kept whole.

    Args:
        module: Left unchanged.
        training: The mode to trace in.

    Returns:
        See :func:`torchq.graph.trace_call`.

    Raises:
        Exception: Whatever the forward raises when its control flow looks at a tensor.
    """
    before = module.training
    module.training = training
    function = "float_forward" if isinstance(module, RewrittenForward) else "forward"
    try:
        return trace_call(_ShallowTracer(function), module)
    finally:
        module.training = before


def _rewritten(
    module: nn.Module, replacements: Mapping[str, str], training: bool
) -> Callable[..., Any]:
    """Return the forward with operators replaced, as a function of the module and its arguments."""
    children = {name: module.get_submodule(name) for name in replacements.values()}
    # A forward that iterates over its children must not meet the new ones.
    for name in children:
        delattr(module, name)
    try:
        graph = trace_forward(module, training)
    finally:
        for name, child in children.items():
            module.add_module(name, child)
    nodes = {node.name: node for node in graph.nodes}
    where = qualified_name(type(module))
    for node, name in replacements.items():
        if node not in nodes:
            raise QuantizationError(
                f"{where}: its forward has no operator {node}; expected the code that was traced"
            )
        _substitute(graph, nodes[node], name, isinstance(children[name], Tap))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<rewritten forward of {where}>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _substitute(graph: fx.Graph, node: fx.Node, child: str, before: bool) -> None:
    """Call ``child`` instead of ``node``, or, for a tap, on the first operand of ``node``."""
    with graph.inserting_before(node):
        if before:
            first = node.args[0]
            node.args = (graph.call_module(child, (first,)), *node.args[1:])
            return
        new = graph.call_module(child, node.args, dict(node.kwargs))
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def replace_operators_(module: nn.Module, replacements: Mapping[str, str]) -> nn.Module:
    """Make the module call its children in the place of operators, in place, and return it.

    :func:`torchq.nn.revert_` is the inverse.

    Args:
        module: A float module; the children that ``replacements`` names exist already.
        replacements: Node name in :func:`trace_forward` -> child name. A :class:`Tap` is called on
            the first operand of the node, any other child instead of the node.

    Raises:
        QuantizationError: The forward has no such node, or ``forward`` was replaced on the
            instance.
    """
    if "forward" in vars(module):
        raise QuantizationError(
            f"{qualified_name(type(module))}: forward was replaced on the instance; "
            "expected the class's own"
        )
    runs = [_rewritten(module, replacements, training) for training in (False, True)]
    change_class(module, _twin(type(module)))  # type: ignore[arg-type]
    rewritten: Any = module
    rewritten.replacements = dict(replacements)
    rewritten._eval_run, rewritten._train_run = runs
    return module


def replace_recorded_operators_(module: nn.Module, record: Mapping[str, Any]) -> nn.Module:
    """Replace the operators that a record names by float children, in place, and return the module.

    Args:
        module: A float module.
        record: What :meth:`RewrittenForward.replacement_record` returned.

    Raises:
        QuantizationError: The module has another class, or another forward.
    """
    if qualified_name(type(module)) != record["class"]:
        raise QuantizationError(
            f"{qualified_name(type(module))}: got this class; expected {record['class']}"
        )
    for child, kind in record["children"].items():
        module.add_module(child, OPERATORS[kind]().train(module.training))
    return replace_operators_(module, record["nodes"])
