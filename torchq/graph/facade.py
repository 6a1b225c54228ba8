"""``Graph``: a traced model with attributes, on which passes are applied by name.

The idea is that of ``nnvm.graph``: a pass is pure, says which attributes it needs and which it
gives, and one that needs what is not there is refused with the name of the pass that gives it.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchq.errors import ConfigError, GraphError
from torchq.graph.calling import tensors_in, with_copies
from torchq.graph.operators import DROPOUTS, may_write, operator_name
from torchq.graph.runner import GraphRunner
from torchq.graph.tracing import trace
from torchq.utils import Registry, evaluating, network_of, random_kept, state_kept


class Graph:
    """A traced model and what is known about it. Never changed: a pass returns a new one.

    Args:
        model: a GraphModule, or any module, which is then traced with the example.
        example: the arguments of one call; the attribute ``"example"`` of the graph.
        attributes: more attributes by name.

    Raises:
        GraphError: the module cannot be traced.
        ConfigError: a module that is no GraphModule comes without an example.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(), nn.Identity())
        >>> graph = Graph(model, example=torch.zeros(1, 4))
        >>> print(graph.apply(["remove_identity", "simplify_inference", "infer_shape"]).ir("shape"))
        Graph(%input) {
          %1 = 0(%input), shape=(1, 2)
          ret %1
        }
        attributes = ['example', 'shape']
    """

    def __init__(
        self,
        model: nn.Module,
        example: object = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, fx.GraphModule):
            if example is None:
                raise ConfigError(
                    f"Graph: got a {type(model).__name__} without an example; expected one to "
                    "trace the model with"
                )
            model = trace(network_of(model), example).graph_module
        of_example = {} if example is None else {"example": example}
        self._module = model
        self._attributes = MappingProxyType({**of_example, **(attributes or {})})

    @property
    def module(self) -> fx.GraphModule:
        """The model. It shares its weights with the model that it was made of."""
        return self._module

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Facts about the graph, by name."""
        return self._attributes

    def with_attributes(self, **attributes: object) -> Graph:
        """Return the same graph with more attributes, or others."""
        return Graph(self._module, attributes={**self._attributes, **attributes})

    def with_module(self, module: fx.GraphModule) -> Graph:
        """Return a rewritten graph. Of the attributes only the example still holds."""
        return Graph(module, self._attributes.get("example"))

    def apply(self, passes: str | Sequence[str]) -> Graph:
        """Return the graph after passes.

        A graph with an example is compared with what a pass makes of it: their results are equal
        bit for bit, or as far as the pass says that it rounds.

        Args:
            passes: one name, or several in order. ``torchq.graph.PASSES`` lists them.

        Raises:
            ConfigError: there is no such pass.
            GraphError: a pass needs an attribute that the graph does not have, or fails, or its
                graph computes something else.
        """
        graph = self
        for name in [passes] if isinstance(passes, str) else passes:
            graph_pass = PASSES[name]
            for attribute in graph_pass.requires:
                if attribute not in graph.attributes:
                    raise GraphError(
                        f"{name}: the graph lacks {attribute!r}. {_advice(attribute)}"
                    )
            before, graph = graph, _run(graph_pass, graph)
            if graph.module is not before.module and "example" in before.attributes:
                _compare(graph_pass, before, graph)
            missing = [
                each for each in graph_pass.provides if each not in graph.attributes
            ]
            if missing:
                raise GraphError(
                    f"{name}: did not give the attribute {missing[0]!r} as it says"
                )
        return graph

    def ir(self, *attributes: str) -> str:
        """Return the graph as text, one node on a line with these attributes of nodes."""
        nodes = list(self._module.graph.nodes)
        named = ("placeholder", "get_attr")
        names = {n: f"%{n.target if n.op in named else i}" for i, n in enumerate(nodes)}
        lines = [
            f"Graph({', '.join(names[n] for n in nodes if n.op == 'placeholder')}) {{"
        ]
        for node in nodes:
            if node.op == "output":
                lines.append(f"  ret {_argument(node.args[0], names)}")
            elif node.op not in named:
                parts = [_argument(value, names) for value in node.args]
                parts += [
                    f"{key}={_argument(value, names)}"
                    for key, value in node.kwargs.items()
                ]
                shown = [key for key in attributes if key in self._attributes]
                notes = [
                    f", {key}={self._attributes[key].get(node.name)}" for key in shown
                ]
                call = f"{_label(node)}({', '.join(parts)})"
                lines.append(f"  {names[node]} = {call}{''.join(notes)}")
        return "\n".join([*lines, "}", f"attributes = {sorted(self._attributes)}"])

    def json(self) -> str:
        """Return the graph as JSON text: nodes with their inputs, in order, and the outputs."""
        graph = self._module.graph
        numbers = {node: number for number, node in enumerate(graph.nodes)}
        reads = {
            node: [numbers[source] for source in node.all_input_nodes]
            for node in numbers
        }
        nodes = [
            {
                "op": _label(node),
                "kind": node.op,
                "name": node.name,
                "inputs": reads[node],
            }
            for node in graph.nodes
            if node.op != "output"
        ]
        heads = reads[graph.output_node()]
        arguments = [numbers[node] for node in graph.nodes if node.op == "placeholder"]
        plain = {
            k: _plain(value) for k, value in self._attributes.items() if k != "example"
        }
        return json.dumps(
            {"nodes": nodes, "arg_nodes": arguments, "heads": heads, "attrs": plain}
        )


@dataclass(frozen=True)
class GraphPass:
    """A named pass: a function of graphs, and the attributes that it requires and provides.

    ``rounding`` is how far results may move, over their largest magnitude: 0 for a pass that folds
    no numbers, infinite for one that computes something else on purpose.
    """

    name: str
    function: Callable[[Graph], Graph]
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    rounding: float = 0.0


#: The passes by name.
PASSES: Registry[str, GraphPass] = Registry("graph pass")


def graph_pass(
    requires: tuple[str, ...] = (),
    provides: tuple[str, ...] = (),
    rounding: float = 0.0,
) -> Callable[[Callable[[Graph], Graph]], Callable[[Graph], Graph]]:
    """Enter the decorated function, with its conditions, as a pass under its own name."""

    def enter(function: Callable[[Graph], Graph]) -> Callable[[Graph], Graph]:
        name = function.__name__
        PASSES.add(name, GraphPass(name, function, requires, provides, rounding))
        return function

    return enter


def _run(found: GraphPass, graph: Graph) -> Graph:
    """Run a pass while the modules of the graph are in eval mode."""
    if not any(module.training for module in graph.module.children()):
        # torch.export's modules refuse to change their mode.
        return found.function(graph)
    with evaluating(graph.module):
        return found.function(graph)


def _compare(found: GraphPass, before: Graph, after: Graph) -> None:
    """Raise GraphError if a pass moved the results on the example further than it says."""
    expected, got = (_results(graph) for graph in (before, after))
    error = math.inf if len(expected) != len(got) else 0.0
    for old, new in zip(expected, got, strict=False):
        error = max(error, _distance(old, new))
    if not error <= found.rounding:
        raise GraphError(
            f"{found.name}: its graph is off by {error:.1e} of the largest result on the example; "
            f"expected at most {found.rounding:.0e}. Leave the pass out, or state its rounding: "
            "graph_pass(rounding=...)"
        )


def _results(graph: Graph) -> list[Tensor]:
    module = graph.module
    modes = (
        evaluating(module)
        if any(m.training for m in module.children())
        else nullcontext()
    )
    with random_kept(), modes, state_kept(module):
        inputs = with_copies(graph.attributes["example"])
        return [t.detach().clone() for t in tensors_in(GraphRunner(module).run(inputs))]


def _distance(old: Tensor, new: Tensor) -> float:
    """Return the largest difference of two results, over the largest magnitude of the first."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return math.inf
    same = (old == new) | ((old != old) & (new != new))
    if bool(same.all()):
        return 0.0
    gap = (old.double() - new.double()).abs()[~same].max()
    largest = old.double().abs().nan_to_num(posinf=0.0).max()
    return float(gap / largest) if gap.isfinite() else math.inf


def _advice(attribute: str) -> str:
    """Return how to get an attribute."""
    givers = [name for name in PASSES if attribute in PASSES[name].provides]
    if givers:
        return f"Apply {' or '.join(map(repr, givers))} first"
    return f"Pass it: Graph(model, {attribute}=...)"


def _label(node: fx.Node) -> str:
    """Return the path of a module, the name of an attribute, or the operator."""
    return operator_name(node) if node.op == "call_function" else str(node.target)


def _argument(value: object, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(element, names) for element in value) + "]"
    return repr(value)


def _plain(value: object) -> object:
    """Return an attribute as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in value]
    return (
        value if value is None or isinstance(value, (bool, int, float)) else str(value)
    )


_DROPOUTS: tuple[object, ...] = (
    *DROPOUTS,
    *(nn.AlphaDropout, nn.functional.dropout, torch.dropout),
)
#: Dimensions of what a BatchNorm reads behind the channels.
_SPATIAL: dict[type, int] = {nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
#: The largest constant, in elements, that replaces its computation.
_MAX_FOLDED = 2**26


def _copy_of(graph: Graph) -> fx.GraphModule:
    """Return a copy to be rewritten, which shares modules and weights."""
    return fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))


def _rewritten(graph: Graph, module: fx.GraphModule) -> Graph:
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

    Before: ``x -> Identity -> reader``.
    After: ``x -> reader``.
    """
    module = _copy_of(graph)
    _bypass(module, lambda node: type(_called(module, node)) is nn.Identity)
    return _rewritten(graph, module)


@graph_pass(rounding=1e-5)
def simplify_inference(graph: Graph) -> Graph:
    """Remove dropout, and write each BatchNorm with fixed statistics as its scale and shift.

    Before: ``x -> Dropout -> BatchNorm -> reader``.
    After: ``x -> mul(scale) -> add(shift) -> reader``.
    """
    module = _copy_of(graph)
    _bypass(module, lambda n: type(_called(module, n)) in _DROPOUTS or _is_off(n))
    for node in list(module.graph.nodes):
        norm = _called(module, node)
        # BatchNorm1d takes two forms of input, so it stays.
        spatial = _SPATIAL.get(type(norm), 0)
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None and spatial:
            _write_scale_and_shift(module, node, norm, spatial)
    return _rewritten(graph, module)


def _is_off(node: fx.Node) -> bool:
    """Return True for a function for dropout that is told not to drop anything."""
    positional = node.args[2] if len(node.args) > 2 else True
    is_dropout = node.op == "call_function" and node.target in _DROPOUTS
    return (
        is_dropout
        and node.kwargs.get("training", node.kwargs.get("train", positional)) is False
    )


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
    value: Any = node.args[0]
    with module.graph.inserting_before(node):
        for name, number, function in (
            ("scale", scale, torch.mul),
            ("shift", shift, torch.add),
        ):
            in_dtype = number.to(norm.running_mean.dtype).view(-1, *[1] * spatial)
            part = _constant(module, f"{node.name}_{name}", in_dtype)
            value = module.graph.call_function(function, (value, part))
        node.replace_all_uses_with(value)
    module.graph.erase_node(node)


def _constant(module: fx.GraphModule, name: str, value: Tensor) -> fx.Node:
    """Return a node that reads a new buffer."""
    free = name
    count = 0
    while hasattr(module, free):
        count += 1
        free = f"{name}_{count}"
    module.register_buffer(free, value)
    return module.graph.get_attr(free)


@graph_pass()
def constant_fold(graph: Graph) -> Graph:
    """Compute once what depends on no input. Parameters count as constants.

    Before: ``weight -> transpose -> reader``.
    After: ``constant -> reader``.
    """
    module = _copy_of(graph)
    runner = fx.Interpreter(module, garbage_collect_values=False)
    value_of_node = runner.env
    for node in module.graph.nodes:
        constant = node.op == "get_attr" or all(
            n in value_of_node for n in node.all_input_nodes
        )
        is_fixed = constant and not _is_random(node) and not may_write(node, None)
        if node.op in ("placeholder", "output") or not is_fixed:
            continue
        with torch.no_grad():
            value_of_node[node] = runner.run_node(node)
    for node in list(module.graph.nodes):
        value = value_of_node.get(node) if node.op != "get_attr" else None
        read = any(user not in value_of_node for user in node.users)
        if read and isinstance(value, Tensor) and value.numel() <= _MAX_FOLDED:
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(
                    _constant(module, f"{node.name}_value", value)
                )
    _remove_dead(module)
    return _rewritten(graph, module)


def _is_random(node: fx.Node) -> bool:
    """Return True for an operator whose results differ from call to call, or that changes state."""
    tags = getattr(node.target, "tags", ())
    name = str(getattr(node.target, "__name__", node.target))
    random = (
        torch.Tag.nondeterministic_seeded in tags or "rand" in name or "dropout" in name
    )
    return random or node.is_impure() or node.op == "call_module"


@graph_pass()
def dce(graph: Graph) -> Graph:
    """Remove what no output needs: nodes, and the modules and tensors that they named.

    Before: any graph.
    After: each node is read or overwrites something, and each module and tensor is named by a node.
    """
    module = _copy_of(graph)
    _remove_dead(module)
    return _rewritten(graph, module)


def _remove_dead(module: fx.GraphModule) -> None:
    """Remove nodes whose value nothing reads, but for those that overwrite another value."""

    def has_effect(node: fx.Node) -> bool:
        return node.is_impure() or may_write(node, _called(module, node))

    module.graph.eliminate_dead_code(has_effect)


@graph_pass(requires=("example",), provides=("shape",))
def infer_shape(graph: Graph) -> Graph:
    """Note the shape of each value by running the graph on its example.

    Before: the graph has an example.
    After: the attribute ``shape`` has a tuple for each node that gives a tensor, by its name.
    """
    return _noted(graph, "shape")


@graph_pass(requires=("example",), provides=("dtype",))
def infer_dtype(graph: Graph) -> Graph:
    """Note the element type of each value by running the graph on its example.

    Before: the graph has an example.
    After: the attribute ``dtype`` has a torch.dtype for each node that gives a tensor, by its name.
    """
    return _noted(graph, "dtype")


def _noted(graph: Graph, what: str) -> Graph:
    meta_by_name = GraphRunner(graph.module).trace_meta(graph.attributes["example"])
    values = {name: getattr(meta, what) for name, meta in meta_by_name.items()}
    return graph.with_attributes(
        **{what: {n: v for n, v in values.items() if v is not None}}
    )


# Set behind the passes of this file, as torchq.fusion imports it for its own.
PASSES.filled_by = "torchq.fusion"
