"""Modules whose own operators (``+``, ``torch.cat``, ``F.linear``, ...) are calls of children.

Quantizers sit in such children. The module object, its children, hooks and parameters stay, as
with every conversion (:mod:`torchq.nn.convert`), and no function or method of torch is patched.
The forward runs as its author wrote it, but for the operators, which a router carries out
(:mod:`torchq.graph.source`): branches, attributes and arguments stay dynamic, and the name of an
operator is its place in the code, whichever branch runs. A forward without source that can be read
is reported.

A :class:`torch.fx.GraphModule` computes what its graph says, and its copies, pickles, exports and
edits start from that graph. Its nodes are its source: it gets a graph with other nodes.
"""

import copy
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, fx, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.graph import (
    OPERATORS,
    ForwardTracer,
    Rewritten,
    SourceSite,
    graph_digest,
    operator_of,
    rewrite_forward,
    trace_call,
)
from torchq.nn.calls.integer_forms import BIAS, integer_form
from torchq.nn.calls.items import items_of_authors
from torchq.nn.calls.overwrites import Overwrites
from torchq.nn.calls.routes import (
    MARK,
    CallSite,
    Recorder,
    Route,
    carry_out,
    operand,
    place_of,
    product_of,
    visits_of,
    with_operands,
)
from torchq.nn.convert import (
    QuantModule,
    Unnoticed,
    change_class,
    class_below,
    unchanged_on_error,
)
from torchq.nn.integer_bias import kernel_bias
from torchq.nn.integer_kernel import integer_call
from torchq.nn.modules.operators import (
    Call,
    QuantTap,
    ScaledDotProductAttention,
    Tap,
    function_of,
)
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import qualified_name

_META, _META_DIGEST = "torchq_operators", "torchq_digest"


class OperatorOwner(QuantModule):
    """Base of modules whose operators (``+``, ``torch.cat``, ...) are calls of their children.

    ``replacements`` maps a site in the source, or a node of a graph, to the name of the child.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True

    replacements: Mapping[str, str] = types.MappingProxyType({})


class ComputedCall(nn.Module):
    """Base of holders that compute a call themselves, in place of the function."""

    def __init__(self, simulated: QuantModule) -> None:
        super().__init__()
        self.simulated = simulated

    def arguments(
        self, func: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, ...] | None:
        """Return what ``forward`` takes for a call; None for a call that it does not compute."""
        raise NotImplementedError


def _last_visits(calls: Sequence[CallSite]) -> dict[str, tuple[int, ...] | None]:
    """Return place -> the last visit of it that is planned; None for one that no run has shown."""
    last_by_place: dict[str, tuple[int, ...] | None] = {}
    for call in calls:
        place = place_of(call.site)
        visits = visits_of(call.site)
        last_by_place[place] = (
            None if call.is_unseen else max(last_by_place.get(place) or visits, visits)
        )
    return last_by_place


@dataclass(frozen=True)
class Routes:
    """What stands at the sites of one module's forward.

    Attributes:
        calls: the calls with weights whose operands are quantized, and those that no run has shown.
        replacements: name of a site -> name of the child that stands for its operator.
        recorder: where calls of the module note their operators, or None.
        planned: name of a site -> the child, or the call.
        watched: the places in the code of these sites, and of calls that no run has shown.
    """

    calls: tuple[CallSite, ...] = ()
    replacements: Mapping[str, str] = field(default_factory=dict)
    recorder: Recorder | None = None

    def __post_init__(self) -> None:
        calls = {call.site: call for call in self.calls if not call.is_unseen}
        planned: dict[str, str | CallSite] = {**self.replacements, **calls}
        last = _last_visits(self.calls)
        places = frozenset([*map(place_of, planned), *last])
        for name, value in (("planned", planned), ("_last", last), ("watched", places)):
            object.__setattr__(self, name, value)

    planned: Mapping[str, str | CallSite] = field(init=False, default_factory=dict)
    watched: frozenset[str] = field(init=False, default=frozenset())
    _last: Mapping[str, tuple[int, ...] | None] = field(
        init=False, default_factory=dict
    )

    def run(
        self,
        owner: nn.Module,
        name: str,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Carry out the function or method at a site, with the child that stands for it."""
        planned = self.planned.get(name)
        if isinstance(planned, CallSite):
            return _run_call(owner, planned, function, args, kwargs)
        if planned is None:
            self._check_unplanned(owner, name, function, args)
            return carry_out(function, args, kwargs)
        child = getattr(owner, planned)
        if not _are_tensors(function, args, kwargs):
            return carry_out(function, args, kwargs)
        if isinstance(child, Tap):
            return _run_behind(child, function, args, kwargs)
        result = child(*args, **kwargs)
        # A tensor that is overwritten keeps its type, whatever the other operand has. A call that
        # changes nothing would stand between the sum and its readers in what planning records.
        if _is_assigning(function) and result.dtype is not args[0].dtype:
            return result.to(args[0].dtype)
        return result

    def _check_unplanned(
        self, owner: Any, name: str, function: Any, args: tuple[Any, ...]
    ) -> None:
        """Raise QuantizationError for a call with a weight that nothing was planned for."""
        place = place_of(name)
        row = product_of(function, args)
        if row is None or row.word == "attention" or place not in self._last:
            return
        last = self._last[place]
        if (
            last is None
            and row.symmetric
            and not any(isinstance(a, nn.Parameter) for a in args)
        ):
            return  # A product of two inputs, as far as anyone can tell.
        if last is None or visits_of(name) > last:
            where = qualified_name(type(owner).float_class)
            raise QuantizationError(
                f"{where}: its forward calls {row.name} with a weight at {name}, which it did not "
                "when it was quantized; expected the calls of the example. Quantize with an "
                f"example that makes them all, exclude the module, or register a twin with "
                f"torchq.nn.register({where})"
            )

    def children(self, owner: nn.Module) -> dict[str, nn.Module]:
        """Return the children that the author of the module gave it, by name."""
        hidden = {
            *self.added(owner),
            *(f"{slot}_quantizer" for slot in type(owner).slots()),  # type: ignore[attr-defined]
        }
        return {
            name: child for name, child in owner.named_children() if name not in hidden
        }

    def added(self, owner: nn.Module) -> list[str]:
        """Return the names of the children that the author of the module did not give it."""
        holders = [
            call.holder for call in self.calls if call.holder and not call.is_unseen
        ]
        stand_ins = (Call, ComputedCall, ScaledDotProductAttention)
        new = [
            name for name in holders if isinstance(owner.get_submodule(name), stand_ins)
        ]
        return list(dict.fromkeys((*self.replacements.values(), *new)))


def _run_behind(
    tap: Tap, function: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Carry out a function whose first operand a tap quantizes."""
    row = operator_of(function)
    if isinstance(tap, QuantTap) and row is not None:

        def in_float(x: Tensor) -> Any:
            return carry_out(function, (x, *args[1:]), kwargs)

        result = tap.on_integers(row.name, in_float, args, kwargs)
        if result is not None:
            return result
    return carry_out(function, (tap(args[0]), *args[1:]), kwargs)


def _run_call(
    owner: nn.Module,
    call: CallSite,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, object],
) -> object:
    """Make a call with a weight on the operands that the quantizers of its holder give."""
    holder: Any = owner
    for name in call.holder.split(".") if call.holder else ():
        # The Dynamo of torch 2.9 follows no get_submodule.
        holder = getattr(holder, name)
    if call.kind == "attention":
        return holder(*args, **kwargs)
    if isinstance(holder, ComputedCall):
        operands = holder.arguments(function, args, kwargs)
        if operands is not None:
            return holder(*operands)
        holder = holder.simulated
    row = product_of(function, args)
    # It was left float, or is again.
    if row is None or not isinstance(holder, QuantModule):
        return carry_out(function, args, kwargs)
    input, weight = row.left, row.right
    if call.weight_is_left:
        input, weight = weight, input
    if not call.weight_is_left:
        result = _on_integers(holder, call, function, args, kwargs)
        if result is not None:
            return result
    changed = {
        input: holder.input_quantizer(operand(args, kwargs, input)),
        weight: holder.weight_quantizer(operand(args, kwargs, weight)),
    }
    bias = operand(args, kwargs, BIAS) if holder.bias_format else None
    if isinstance(bias, Tensor):
        changed[BIAS] = kernel_bias(holder, bias)
    args, kwargs = with_operands(args, kwargs, changed)
    return carry_out(function, args, kwargs)


def _on_integers(
    holder: QuantModule,
    call: CallSite,
    function: object,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Tensor | None:
    """Return the result of a call with a weight by integer kernels; None where it simulates."""
    if holder.integer_kernel is None:
        return None
    form = integer_form(function, args, kwargs)
    if form is None:
        return None
    return integer_call(holder, form.operands, form.multiply, call.site)


class RoutedModule(OperatorOwner):
    """Base of the classes that :func:`route_` makes, one or two for each float class.

    The forward of the float class runs as its author wrote it, but for the operators and calls at
    its sites, which a router hands to :class:`Routes` (:mod:`torchq.graph.source`). Their names
    begin with ``torchq``, since the author's attributes stay.
    """

    #: What was read of it.
    reading: ClassVar[Rewritten]

    torchq_routes: Routes = Routes()

    @property
    def replacements(self) -> Mapping[str, str]:  # type: ignore[override]
        """Name of a site -> name of the child that stands for its operator."""
        return self.torchq_routes.replacements

    @property
    def torchq_calls(self) -> tuple[CallSite, ...]:
        """The calls with weights whose operands are quantized, and those that no run has shown."""
        return self.torchq_routes.calls

    @torchq_calls.setter
    def torchq_calls(self, calls: Sequence[CallSite]) -> None:
        self.torchq_routes = replace(self.torchq_routes, calls=tuple(calls))

    def holders(self) -> Iterator[tuple[CallSite, nn.Module]]:
        """Yield each call with the module that holds its quantizers."""
        for call in self.torchq_calls:
            if not call.is_unseen:
                yield call, self.get_submodule(call.holder)

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield the weight quantizers of calls with a parameter, each with that parameter.

        A computed weight is calibrated as an input is, by observing it. A child that computes with
        its weight itself reports it.
        """
        for call, holder in self.holders():
            if call.weight and (holder is self or isinstance(holder, Call)):
                quantizer = getattr(holder, "weight_quantizer", None)
                if isinstance(quantizer, TensorQuantizer):
                    yield quantizer, self.get_parameter(call.weight)

    def on_revert(self) -> None:
        """Remove the children that stand for operators or hold quantizers, and the routes."""
        for child in self.torchq_routes.added(self):
            delattr(self, child)
        vars(self).pop("torchq_routes", None)

    def __reduce_ex__(self, protocol: object) -> Any:
        # The class is made at run time: copies and pickles look it up by its float class.
        reduced: Any = super().__reduce_ex__(2)
        cls = type(self)
        arguments = (cls.float_class, cls.is_container, cls.reading.digest)
        return _blank, arguments, *reduced[2:]


def _are_tensors(
    function: object, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> bool:
    """Return False where a call has a number in the place of a tensor, or another form."""
    row = operator_of(function)
    operands = None if row is None else row.operands(args, kwargs)
    return operands is not None and all(
        isinstance(o, (Tensor, fx.Proxy)) for o in operands
    )


def _is_assigning(function: object) -> bool:
    """Return True for ``+=`` and its like, and methods such as ``add_``."""
    if isinstance(function, str):
        return function[-1] == "_"
    return function is operator.iadd or function is operator.imul


@cache
def _readings(cls: type[nn.Module]) -> list[Rewritten]:
    """Return what was read so far of the forwards of a class, which may change."""
    return []


def rewritten(cls: type[nn.Module]) -> Rewritten:
    """Return the forward of a class with routes, as its code is now."""
    readings = _readings(cls)  # type: ignore[arg-type]
    current = next((reading for reading in readings if reading.is_current), None)
    if current is None:
        current = rewrite_forward(cls, Route)
        readings.append(current)
    return current


def forward_digest(module: nn.Module) -> str:
    """Return a hash of the code that operators of a module have their places in; "" for none."""
    if isinstance(module, RewrittenGraph):
        digest: str = module.meta[_META_DIGEST]
        return digest
    if isinstance(module, fx.GraphModule):
        return graph_digest(module.graph)
    return (
        module.reading if isinstance(module, RoutedModule) else rewritten(type(module))
    ).digest


@cache
def _routed_class(
    cls: type[nn.Module], found: Rewritten, is_container: bool
) -> type[RoutedModule]:
    """Return the class of routed modules: one for each forward, so types of copies agree."""
    if found.forward is None:
        raise QuantizationError(
            f"{qualified_name(cls)}: the source of its forward cannot be read; expected the code "
            "that was quantized"
        )
    slots = ((), ()) if is_container else (("input",), ("weight",))
    return class_below(
        (RoutedModule, cls),
        f"{'Routed' if is_container else 'Quant'}{cls.__name__}",
        f":class:`{qualified_name(cls)}` with quantized operators and calls.",
        forward=found.forward,
        reading=found,
        input_slots=slots[0],
        weight_slots=slots[1],
        is_container=is_container,
        **items_of_authors(cls),
    )


def _blank(cls: type[nn.Module], is_container: bool, digest: str) -> RoutedModule:
    readings = (r for r in _readings(cls) if r.digest == digest)  # type: ignore[arg-type]
    reading = next(readings, None) or rewritten(cls)
    if reading.digest != digest:
        raise QuantizationError(f"{qualified_name(cls)}: {CHANGED}")
    twin: type[RoutedModule] = _routed_class(cls, reading, is_container)  # type: ignore[arg-type]
    return twin.__new__(twin)


#: What is wrong with a forward whose digest is another one.
CHANGED = (
    "its forward, or a function that it calls, is not the one that was quantized; expected the "
    "same code, as operators are known by their places in it. Quantize and calibrate again"
)


@contextmanager
def recording_operators(
    modules: Iterable[nn.Module], overwrites: Overwrites | None = None
) -> Iterator[dict[int, Recorder]]:
    """Let those of the modules note their operators in the block whose source allows it, by id."""
    recorder_by_id: dict[int, Recorder] = {}
    changed = []
    try:
        for module in modules:
            cls = type(module)
            if isinstance(module, fx.GraphModule) or "forward" in vars(module):
                continue
            reading = rewritten(cls)
            if reading.forward is None:
                continue
            change_class(module, _routed_class(cls, reading, True))  # type: ignore[arg-type]
            changed.append((module, cls))
            recorder_by_id[id(module)] = Recorder(overwrites)
            vars(module)["torchq_routes"] = Routes(recorder=recorder_by_id[id(module)])
        yield recorder_by_id
    finally:
        for module, cls in changed:
            vars(module).pop("torchq_routes", None)
            change_class(module, cls)


class NotedMode:
    """The attribute ``training`` of one module, which notes that somebody reads it.

    Attributes:
        was_read: somebody did.
    """

    def __init__(self) -> None:
        self.was_read = False

    def __get__(self, module: Any, cls: type[nn.Module]) -> Any:
        if module is None:
            return self
        self.was_read = True
        return vars(module)["training"]

    def __set__(self, module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode


@contextmanager
def noting_mode(module: nn.Module) -> Iterator[NotedMode]:
    """Note in the block whether the code of a module asks if it trains; a graph never asks.

    Where a metaclass of the user would make the class that notes it, it counts as asking.
    """
    cls = type(module)
    mode = NotedMode()
    if isinstance(module, fx.GraphModule) or type(cls) is not type:
        mode.was_read = not isinstance(module, fx.GraphModule)
        yield mode
        return
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body = {"training": mode, **names}
    bases = (cls,) if issubclass(cls, Unnoticed) else (Unnoticed, cls)
    noting: Any = type(cls.__name__, bases, body)
    change_class(module, noting)
    try:
        yield mode
    finally:
        change_class(module, cls)


class _ShallowTracer(ForwardTracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(
    module: nn.Module, training: bool, restore: Callable[[], None] | None = None
) -> fx.Graph:
    """Return the graph of the module's own forward, with its children kept whole.

    ``restore`` is as for :func:`torchq.graph.trace_call`.
    """
    if isinstance(module, fx.GraphModule):
        return copy.deepcopy(module.graph)
    # Not read as an attribute, which :func:`noting_mode` would note.
    before = vars(module)["training"]
    module.training = training
    try:
        return trace_call(_ShallowTracer(), module, restore=restore)
    finally:
        module.training = before


def route_(
    module: nn.Module,
    operators: Mapping[str, str] | None = None,
    calls: Sequence[CallSite] = (),
    *,
    input: QuantDescriptor | None = None,
    weight: QuantDescriptor | None = None,
) -> nn.Module:
    """Let the forward of a module call, at each site in its code, the child that is given for it.

    :func:`torchq.nn.revert_` is the inverse.

    Args:
        module: a float module, changed in place and returned.
        operators: name of a site, or of a node of a graph module -> name of the child that stands
            for its operator, which is there already.
        calls: the calls with weights. A holder that does not exist is added as a float
            :class:`Call` (:class:`ScaledDotProductAttention` for attention), to be converted next.
        input: how the module quantizes the input of the one call that has no holder.
        weight: how it quantizes the weight.

    Raises:
        QuantizationError: the module cannot be routed, or its code has no such sites.
    """
    cls, operators = type(module), operators or {}
    planned = [call for call in calls if not call.is_unseen]
    has_own = any(not call.holder for call in planned)
    _check_routable(module, operators, planned, has_own)
    if isinstance(module, fx.GraphModule):
        return replace_nodes_(module, operators)
    reading = rewritten(cls)
    twin = _routed_class(cls, reading, not has_own)  # type: ignore[arg-type]
    for name, word in (
        {call.site: call.kind for call in calls} | dict.fromkeys(operators)
    ).items():
        _check_site(cls, name, word, reading.sites)
    routed: Any = module
    with unchanged_on_error(module):
        _add_holders(module, planned)
        change_class(module, twin)
        routed.torchq_routes = Routes(tuple(calls), dict(operators))
        routed.attach_quantizers(
            **({"input": input, "weight": weight} if has_own else {})
        )
    return module


def _check_routable(
    module: nn.Module,
    operators: Mapping[str, str],
    calls: Sequence[CallSite],
    has_own: bool,
) -> None:
    """Raise QuantizationError if :func:`route_` cannot convert the module."""
    where = qualified_name(type(module))
    if "forward" in vars(module):
        raise QuantizationError(
            f"{where}: forward was replaced on the instance; expected the class's own"
        )
    if calls and isinstance(module, fx.GraphModule):
        raise QuantizationError(
            f"{where}: is a graph of torch.fx, whose copies would lose the quantizers; expected a "
            "module with a forward of its own. Quantize the model before it is traced"
        )
    if has_own and len(calls) > 1:
        raise QuantizationError(
            f"{where}: got a call without a holder among {len(calls)}; expected one call alone, or "
            "a holder for each"
        )
    if has_own and hasattr(module, "input_quantizer"):
        raise QuantizationError(
            f"{where}: has quantizers already; expected a float module"
        )
    for child in operators.values():
        if not child.isidentifier():
            raise QuantizationError(
                f"{where}: got {child!r} as the name of a child; expected a Python identifier"
            )
    for call in calls:
        _check_paths(module, call)


def _check_paths(module: nn.Module, site: CallSite) -> None:
    name = qualified_name(type(module))
    parent, _, leaf = site.weight.rpartition(".")
    try:
        if site.weight and leaf not in dict(
            module.get_submodule(parent).named_parameters()
        ):
            raise AttributeError(f"it has no parameter {site.weight}")
        if "." in site.holder or hasattr(module, site.holder):
            module.get_submodule(site.holder)
    except AttributeError as error:
        raise QuantizationError(
            f"{name}: got a call with the weight {site.weight!r} and the holder {site.holder!r}; "
            f"expected names of the module ({error})"
        ) from None


def _add_holders(module: nn.Module, calls: Sequence[CallSite]) -> None:
    """Add the float children that will hold quantizers."""
    for site in calls:
        if "." in site.holder or not site.holder or hasattr(module, site.holder):
            continue
        holder = ScaledDotProductAttention() if site.kind == "attention" else Call()
        module.add_module(site.holder, holder.train(module.training))


def _check_site(
    cls: type[nn.Module], name: str, word: str | None, sites: Sequence[SourceSite]
) -> None:
    """Raise QuantizationError if the code has no such operator, or no call of such a function."""
    word_by_place = {MARK + s.name: OPERATORS[s.operator].word for s in sites}
    if place_of(name) not in word_by_place or word not in (
        None,
        word_by_place[place_of(name)],
    ):
        what = "operator" if word is None else f"call of {word} at"
        raise QuantizationError(
            f"{qualified_name(cls)}: its forward has no {what} {name}; "
            "expected the code that was quantized"
        )


class RewrittenGraph(OperatorOwner):
    """Base of graph modules in which nodes call children instead of operators."""

    graph: fx.Graph
    meta: dict[str, Any]

    @property
    def replacements(self) -> Mapping[str, str]:  # type: ignore[override]
        """Name of a node of the float graph -> name of the child that it calls now."""
        # Copies of a graph module keep ``meta``, and no other attributes.
        child_by_node: Mapping[str, str] = self.meta.get(_META, {})
        return child_by_node

    def on_revert(self) -> None:
        """Let the nodes call functions again, and remove the children."""
        children = set(self.replacements.values())
        graph = copy.deepcopy(self.graph)
        for node in list(graph.nodes):
            if node.op != "call_module" or node.target not in children:
                continue
            module = self.get_submodule(str(node.target))
            if isinstance(module, Tap):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            else:
                node.op = "call_function"
                node.target = function_of(module)
        self.graph = graph
        for child in children:
            delattr(self, child)
        self.meta.pop(_META, None)
        self.meta.pop(_META_DIGEST, None)

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        function, arguments = reduced
        meta = {name: self.meta[name] for name in (_META, _META_DIGEST)}
        return _unpickled, (type(self).float_class, meta, function, arguments)


@cache
def _graph_class(cls: type[nn.Module]) -> type[RewrittenGraph]:
    doc = f":class:`{qualified_name(cls)}` with operators replaced by child modules."
    return class_below((RewrittenGraph, cls), f"Rewritten{cls.__name__}", doc)


def _unpickled(
    cls: type[nn.Module],
    kept: dict[str, object],
    function: Any,
    arguments: Sequence[object],
) -> fx.GraphModule:
    module: fx.GraphModule = function(*arguments)
    module.meta.update(kept)
    change_class(module, _graph_class(cls))  # type: ignore[arg-type]
    return module


def replace_nodes_(
    module: fx.GraphModule, replacements: Mapping[str, str]
) -> fx.GraphModule:
    """Make nodes of the module's graph call its children, in place, and return the module."""
    # A copy is changed, so that an error further on leaves the module with the graph that it had.
    graph = copy.deepcopy(module.graph)
    digest = graph_digest(graph)
    nodes = {node.name: node for node in graph.nodes}
    # The class without the layer that torch adds for each object.
    cls: Any = type(type(module).__new__(type(module))).__bases__[0]
    for name, child in replacements.items():
        if name not in nodes:
            raise QuantizationError(
                f"{qualified_name(cls)}: its forward has no operator {name}; expected the code "
                "that was quantized"
            )
        node = nodes[name]
        # It gets the first operand of the node.
        if isinstance(module.get_submodule(child), Tap):
            with graph.inserting_before(node):
                first = graph.call_module(child, (node.args[0],))
            node.args = (first, *node.args[1:])
        else:
            node.op = "call_module"
            node.target = child
    # The class that the module had keeps the code of the graph that it had.
    change_class(module, _graph_class(cls))
    module.graph = graph
    module.meta[_META] = dict(replacements)
    module.meta[_META_DIGEST] = digest
    return module
