"""A module whose own operators (``+``, ``torch.cat``, ...) are calls of child modules, so that quantizers can sit there.

The forward of the module's class is traced with all children kept whole, once for training and once for evaluation; chosen operators
become calls of new children; the result runs in place of the class's forward. The module object, its children, hooks and parameters stay,
as with every conversion (:mod:`torchq.nn.convert`), and no function or method of torch is patched.
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
from torchq.nn.modules.attention import ScaledDotProductAttention
from torchq.nn.modules.elementwise import ELEMENTWISE, Tap
from torchq.utils import qualified_name

__all__ = ["WiredModule", "rewire_", "trace_forward", "wire_"]

_PLACED: dict[str, type[nn.Module]] = {
    **ELEMENTWISE,
    ScaledDotProductAttention.__name__: ScaledDotProductAttention,
}


class WiredModule(QuantModule):
    """Base of the classes that :func:`wire_` makes, one for each float class.

    Attributes:
        wiring: node of the traced forward -> name of the child that stands there.
    """

    quantizers = ()
    is_container = True
    #: The class's own forward, under a name that the tracer can ask for.
    float_forward: ClassVar[Callable[..., Any]]

    wiring: Mapping[str, str]

    def wiring_record(self) -> dict[str, Any]:
        """What :func:`rewire_` needs to wire a float twin of this module, as JSON data."""
        kinds = {}
        for child in self.wiring.values():
            module = self.get_submodule(child)
            kinds[child] = (
                type(module).float_class if isinstance(module, QuantModule) else type(module)
            ).__name__
        return {
            "class": qualified_name(type(self).float_class),
            "nodes": dict(self.wiring),
            "children": kinds,
        }

    def _compile(self) -> None:
        self._eval_run, self._train_run = (
            _rewired(self, self.wiring, training) for training in (False, True)
        )

    def _detach(self) -> None:
        for child in self.wiring.values():
            delattr(self, child)
        for name in ("wiring", "_eval_run", "_train_run"):
            delattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time and the functions by exec: copies and pickles make them again.
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
def _twin(cls: type[Any]) -> type[WiredModule]:
    """The wired class of a float class: one for each, so that types of copies are equal."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (self._train_run if self.training else self._eval_run)(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # exporters ask for the names of arguments
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]  # and torch.fx looks for them in the code
    text = f"Wired :class:`{qualified_name(cls)}`."
    body = {
        "float_class": cls,
        "float_forward": cls.forward,
        "forward": forward,
        "__doc__": text,
        "__module__": cls.__module__,
    }
    return types.new_class(
        f"Wired{cls.__name__}", (WiredModule, cls), {}, lambda namespace: namespace.update(body)
    )


def _blank(cls: type[nn.Module]) -> WiredModule:
    twin: type[WiredModule] = _twin(cls)  # type: ignore[arg-type]
    return twin.__new__(twin)


class _ShallowTracer(ForwardTracer):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.traced_func_name = function

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(module: nn.Module, training: bool) -> fx.Graph:
    """The graph of the module's own forward, its children kept whole; see :func:`torchq.graph.trace_call`.

    Raises:
        Exception: whatever the forward raises when its control flow looks at a tensor.
    """
    before = module.training
    module.training = training
    try:
        return trace_call(
            _ShallowTracer("float_forward" if isinstance(module, WiredModule) else "forward"),
            module,
        )
    finally:
        module.training = before


def _rewired(module: nn.Module, wiring: Mapping[str, str], training: bool) -> Callable[..., Any]:
    """The forward with the operators in ``wiring`` replaced, as a function of the module and its arguments."""
    children = {name: module.get_submodule(name) for name in wiring.values()}
    for name in children:  # a forward that iterates over its children must not meet them
        delattr(module, name)
    try:
        graph = trace_forward(module, training)
    finally:
        for name, child in children.items():
            module.add_module(name, child)
    nodes = {node.name: node for node in graph.nodes}
    for node, name in wiring.items():
        if node not in nodes:
            raise QuantizationError(
                f"{qualified_name(type(module))}: its forward has no operator {node}; expected the code that was wired"
            )
        _substitute(graph, nodes[node], name, isinstance(children[name], Tap))
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<wired forward of {qualified_name(type(module))}>", "exec"), namespace)
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


def wire_(module: nn.Module, wiring: Mapping[str, str]) -> nn.Module:
    """Let children of ``module`` stand for operators of its forward, in place, and return it. :func:`torchq.nn.revert_` undoes it.

    Args:
        module: float; the children named in ``wiring`` are there already.
        wiring: node name in :func:`trace_forward` -> child name. A :class:`Tap` is called on the node's first
            operand, any other child instead of the node.

    Raises:
        QuantizationError: the forward has no such node, or ``forward`` was replaced on the instance.
    """
    if "forward" in vars(module):
        raise QuantizationError(
            f"{qualified_name(type(module))}: forward was replaced on the instance; expected the class's own"
        )
    runs = [_rewired(module, wiring, training) for training in (False, True)]
    change_class(module, _twin(type(module)))  # type: ignore[arg-type]
    wired: Any = module
    wired.wiring = dict(wiring)
    wired._eval_run, wired._train_run = runs
    return module


def rewire_(module: nn.Module, record: Mapping[str, Any]) -> nn.Module:
    """Wire a float ``module`` as :meth:`WiredModule.wiring_record` says, with float children, in place, and return it.

    Raises:
        QuantizationError: another class, or another forward.
    """
    if qualified_name(type(module)) != record["class"]:
        raise QuantizationError(
            f"{qualified_name(type(module))}: got this class; expected {record['class']}"
        )
    for child, kind in record["children"].items():
        module.add_module(child, _PLACED[kind]().train(module.training))
    return wire_(module, record["nodes"])
