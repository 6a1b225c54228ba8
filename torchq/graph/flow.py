"""Which calls of one forward pass read the results of which: from a trace, or from a real run."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchq.graph.calling import Forward, address_of, prepared_call, tensors_in
from torchq.graph.operators import (
    effects_of,
    function_name,
    operator_name,
    operator_of,
    overwrites,
    reads_metadata,
)
from torchq.graph.tracing import is_torch_leaf
from torchq.graph.values import ValueTracker, has_form_of, returned_operand
from torchq.utils import child_path, network_of, random_kept, untouched

#: How the names of functions begin that make random numbers.
_RANDOM = (
    *(
        "rand",
        "normal_",
        "uniform_",
        "exponential_",
        "bernoulli",
        "poisson",
        "multinomial",
    ),
    *("empty", "new_empty", "dropout", "alpha_dropout", "feature_dropout"),
)


def _is_layer(function: object) -> bool:
    """Return True for ``F.linear`` and its like, which with a layer's weight are its call."""
    row = operator_of(function)
    return (
        row is not None
        and bool(row.layer)
        and row.right == (1, "weight")
        and not row.module
    )


def passes_bias(
    layer: nn.Module,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    is_own: Callable[[Any], bool],
) -> bool:
    """Return True if ``F.linear`` or its like would see a bias that ``layer`` gets later."""
    if len(args) < 3 and "bias" not in kwargs:
        return False
    bias = args[2] if len(args) > 2 else kwargs["bias"]
    return bias is None if getattr(layer, "bias", None) is None else is_own(bias)


def read_arguments(
    name: str, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Any, ...]:
    """Return the arguments of function ``name`` whose values it reads, not only their shapes."""
    effects = effects_of(name)
    if "like" in effects:
        return args[1:], kwargs
    return args[:1] if "as" in effects else (args, kwargs)


@dataclass(frozen=True)
class Call:
    """One call in the forward pass.

    Attributes:
        index: its position in :attr:`Flow.calls`.
        name: dotted path of the module, or the function's name.
        module: the leaf module that was called, or with whose weight a function was.
        inputs: indices of the calls whose results it reads, with repetition.
        arguments: the positional arguments that are plain values (numbers, slices).
        functional: it is a function that has its own stride and padding.
        options: the keyword arguments that are plain values.
        shape: of the result, if it is known.
        inside: the path of the module whose forward makes the call, if it is known.
        stored: all tensors that it reads are parameters, buffers and attributes of modules, or are
            computed of these and of numbers, as anchors are. Random numbers do not count.
        returned: the call whose result it returns or copies, whatever that is, as ``x * 1`` does;
            none where that is what the model reads. None for a call that computes something.
        idle: it is a module that gave its input back in the run, and computed nothing, as those do
            that drop branches in training.
        writes: it is a function that overwrites one of its operands.
        operands: of a recorded call, one number for each tensor that it reads, as in ``inputs``; -1
            of those that no call has computed, such as inputs of the model and parameters.
        ends_in: the name of the function whose result a leaf module returned as it was; "" for
            functions, and where that is not known.
    """

    index: int
    name: str
    module: nn.Module | None
    inputs: tuple[int, ...]
    arguments: tuple[Any, ...] = ()
    functional: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    inside: str = ""
    stored: bool = False
    returned: tuple[int, ...] | None = None
    idle: bool = False
    writes: bool = False
    operands: tuple[int, ...] = ()
    ends_in: str = ""

    @property
    def ndim(self) -> int | None:
        """How many dimensions the result has, if it is known."""
        return None if self.shape is None else len(self.shape)


@dataclass(frozen=True)
class Flow:
    """The calls of one forward pass.

    Attributes:
        calls: all of them, in order.
        outputs: indices of those that the model returns.
        origin: ``"fx"`` or ``"recorder"``.
        read: ids of modules with parameters that something else reads than calls of these modules.
    """

    calls: tuple[Call, ...]
    outputs: frozenset[int]
    origin: str
    read: frozenset[int] = frozenset()

    @cached_property
    def _consumers(self) -> dict[int, list[int]]:
        readers: dict[int, list[int]] = {}
        for call in self.calls:
            for source in call.inputs:
                readers.setdefault(source, []).append(call.index)
        return readers

    @cached_property
    def _by_module(self) -> dict[int, list[Call]]:
        calls_by_id: dict[int, list[Call]] = {}
        for call in self.calls:
            if call.module is not None:
                calls_by_id.setdefault(id(call.module), []).append(call)
        return calls_by_id

    @cached_property
    def live(self) -> frozenset[int]:
        """Indices of the calls that a result of the model depends on, in a recorded flow.

        What overwrites a tensor or gives none, as what Python asks a number of, counts as one.
        """
        waiting = [
            *self.outputs,
            *(call.index for call in self.calls if call.writes or call.shape is None),
        ]
        live: set[int] = set()
        while waiting:
            index = waiting.pop()
            if index not in live:
                live.add(index)
                waiting += self.calls[index].inputs
        return frozenset(live)

    def consumers(self, call: Call) -> list[Call]:
        """Return the calls that read the result of ``call``, twice if they read it twice."""
        return [self.calls[index] for index in self._consumers.get(call.index, ())]

    def calls_of(self, module: nn.Module) -> list[Call]:
        """Return every call of ``module``."""
        return self._by_module.get(id(module), [])


def _layer_of(node: fx.Node, owners: Mapping[str, nn.Module]) -> nn.Module | None:
    if node.op != "call_function" or not _is_layer(node.target):
        return None
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    is_named = isinstance(weight, fx.Node) and weight.op == "get_attr"
    path = str(weight.target) if is_named else ""  # type: ignore[union-attr]
    layer = owners.get(path)
    bias_path = path.removesuffix("weight") + "bias"
    if layer is None or not passes_bias(
        layer,
        node.args,
        node.kwargs,
        lambda bias: getattr(bias, "target", None) == bias_path,
    ):
        return None
    return layer


def flow_of_graph(graph_module: fx.GraphModule, root: nn.Module) -> Flow:
    """Return the flow of a traced model."""
    modules = dict(root.named_modules(remove_duplicate=False))
    owners = {child_path(path, "weight"): module for path, module in modules.items()}
    calls: list[Call] = []
    index: dict[fx.Node, int] = {}
    outputs: set[int] = set()
    for node in graph_module.graph.nodes:
        sources = tuple(index[source] for source in _sources(node) if source in index)
        if node.op == "output":
            outputs.update(sources)
        if node.op == "output" or reads_metadata(node):
            continue
        is_path = node.op in ("call_module", "get_attr", "placeholder")
        name = str(node.target) if is_path else operator_name(node.target)
        layer = _layer_of(node, owners)
        module = modules.get(name) if node.op == "call_module" else layer
        plain = tuple(value for value in node.args if not isinstance(value, fx.Node))
        options = {
            k: value
            for k, value in node.kwargs.items()
            if not isinstance(value, fx.Node)
        }
        index[node] = len(calls)
        calls.append(
            Call(len(calls), name, module, sources, plain, layer is not None, options)
        )
    read = frozenset(_read_elsewhere(graph_module, modules, owners))
    return Flow(tuple(calls), frozenset(outputs), "fx", read)


def _read_elsewhere(
    graph_module: fx.GraphModule,
    modules: Mapping[str, nn.Module],
    layers: Mapping[str, nn.Module],
) -> Iterator[int]:
    for node in graph_module.graph.nodes:
        owner = (
            modules.get(str(node.target).rpartition(".")[0])
            if node.op == "get_attr"
            else None
        )
        if owner is not None and any(
            node in _sources(user) and _layer_of(user, layers) is not owner
            for user in node.users
        ):
            yield id(owner)


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose results ``node`` reads, with repetition."""
    sources: list[fx.Node] = []
    if reads_metadata(node):
        return sources
    values: Any = (node.args, node.kwargs)
    if node.op in ("call_function", "call_method"):
        values = read_arguments(operator_name(node.target), node.args, node.kwargs)
    fx.node.map_arg(values, sources.append)
    return sources


def _is_random(function: str) -> bool:
    """Return True for functions that make another tensor at each call."""
    # F.normalize begins as torch.normal does.
    return function == "normal" or function.startswith(_RANDOM)


class _Recorder(TorchFunctionMode):
    """Notes every torch function that is called outside leaf modules, which hooks note."""

    def __init__(
        self,
        model: nn.Module,
        tracker: ValueTracker | None,
        renewed: Iterable[nn.Module],
    ) -> None:
        super().__init__()
        self._tracker = tracker
        self._renewed = set(map(id, renewed))
        self.is_showing = False
        self.names = {id(module): name for name, module in model.named_modules()}
        self.owners: dict[int, tuple[str, nn.Module]] = {}
        self.holders: dict[int, set[int]] = {}
        for name, module in model.named_modules():
            if isinstance(getattr(module, "weight", None), Tensor):
                self.owners[id(module.weight)] = (name, module)
            for tensor in (
                *module.parameters(recurse=False),
                *module.buffers(recurse=False),
            ):
                self.holders.setdefault(id(tensor), set()).add(id(module))
        self.read: set[int] = set()
        self.calls: list[Call] = []
        self.depth = 0
        # The modules that are running, none of them a leaf.
        self.entered: list[str] = []
        self.pending: list[tuple[tuple[int, ...], bool]] = []  # operands, and stored
        self._computed_inside = False
        # The last function that a leaf called, and its result.
        self._last_inside: tuple[str, object] = ("", None)
        self._producer: dict[int, int] = {}
        attributes = [
            a
            for m in model.modules()
            for a in vars(m).values()
            if isinstance(a, Tensor)
        ]
        self._stored = {*self.holders, *map(id, attributes)}
        # Parameters, and what is computed of them: training changes them.
        self._learned = set(map(id, model.parameters()))
        # An id is only unique while its tensor lives.
        self._alive: list[Tensor] = attributes

    def sources(self, *values: object) -> tuple[int, ...]:
        return tuple(
            self._producer[id(t)] for t in tensors_in(values) if id(t) in self._producer
        )

    def operands(self, *values: object) -> tuple[int, ...]:
        """Return the call that computed each tensor, -1 for none."""
        return tuple(self._producer.get(id(t), -1) for t in tensors_in(values))

    def flow(self, out: object) -> Flow:
        """Return the calls of a run that returned ``out``."""
        outputs = frozenset(self.sources(out))
        return Flow(tuple(self.calls), outputs, "recorder", frozenset(self.read))

    def begin_leaf(self, module: nn.Module, args: object, kwargs: object) -> None:
        if self.depth == 0:
            read = {id(tensor) for tensor in tensors_in((args, kwargs))}
            is_stored = bool(read) and self._stored.issuperset(read)
            self.pending.append((self.operands(args, kwargs), is_stored))
            self.note_parameters(module, args, kwargs)
            self._computed_inside = False
            self._last_inside = ("", None)
        self.depth += 1

    def end_leaf(
        self, module: nn.Module, args: object, kwargs: object, out: Any
    ) -> Any:
        if id(module) in self._renewed:
            out = out.view(out.shape)
        self.depth -= 1
        if self.depth == 0:
            name = self.names[id(module)]
            operands, is_stored = self.pending.pop()
            function, result = self._last_inside
            is_idle = not self._computed_inside and any(
                out is tensor for tensor in tensors_in((args, kwargs))
            )
            self.note(
                out,
                name=name,
                module=module,
                operands=operands,
                stored=is_stored,
                idle=is_idle,
                ends_in=function if result is out else "",
            )
        return out

    def enter(self, module: nn.Module, *_: object) -> None:
        self.entered.append(self.names[id(module)])

    def leave(self, *_: object) -> None:
        self.entered.pop()

    def show(
        self,
        see: Callable[..., None],
        module: nn.Module,
        args: object,
        kwargs: object,
        out: object = None,
    ) -> None:
        """Let a function see a call, and record nothing of what it computes."""
        self.is_showing = True
        see(args, kwargs, out)
        self.is_showing = False

    def note_parameters(self, module: nn.Module | None, *values: object) -> None:
        """Note the modules whose parameters a call reads, other than the called ``module``."""
        for tensor in tensors_in(values):
            holders = self.holders.get(id(tensor), set())
            if id(module) not in holders:
                self.read |= holders

    def note(self, out: object, operands: tuple[int, ...], **fields: Any) -> None:
        """Note a call with these operands, and other fields of :class:`Call`."""
        inputs = tuple(index for index in operands if index >= 0)
        results = list(tensors_in(out))
        index = len(self.calls)
        shape = tuple(results[0].shape) if results else None
        inside = self.entered[-1] if self.entered else ""
        self.calls.append(
            Call(
                index,
                inputs=inputs,
                operands=operands,
                shape=shape,
                inside=inside,
                **fields,
            )
        )
        self._producer |= {id(tensor): index for tensor in results}
        if fields.get("stored"):
            self._stored.update(map(id, results))
        self._alive += results

    def _forget_stored(self, written: object) -> None:
        """Note that tensors, and all that share their memory, hold what the input gave."""
        for tensor in tensors_in(written):
            place = address_of(tensor)
            self._stored.discard(id(tensor))
            self._stored -= {
                id(other)
                for other in self._alive
                if place and address_of(other) == place
            }

    def _is_fixed(self, tensor: Tensor) -> bool:
        """Return True for a buffer, and for what is computed of buffers and numbers alone."""
        return id(tensor) in self._stored and id(tensor) not in self._learned

    def _run(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        returned: Tensor | None = None,
    ) -> Any:
        if self._tracker is None:
            return func(*args, **kwargs)
        return self._tracker.run(func, args, kwargs, returned)

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        if self.is_showing:
            return func(*args, **kwargs)
        reads_metadata = "metadata" in effects_of(function_name(func))
        if self.depth or reads_metadata:
            out = self._run(func, args, kwargs)
            if not reads_metadata:
                self._computed_inside = True
                self._last_inside = (function_name(func), out)
            return out
        values = read_arguments(function_name(func), args, kwargs)
        operands = self.operands(values)
        read = {id(tensor) for tensor in tensors_in(values)}
        returned = returned_operand(func, args, kwargs, self._is_fixed)
        source = None if returned is None else self.sources(returned)
        out = self._run(func, args, kwargs, returned)
        name = function_name(func)
        writes = overwrites(func, kwargs) or "out" in kwargs
        if writes and (_is_random(name) or not self._stored.issuperset(read)):
            self._forget_stored(kwargs.get("out", args[0] if args else out))
        module = None
        if _is_layer(func):
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            path, layer = self.owners.get(id(weight), (name, None))
            if layer is not None and passes_bias(
                layer, args, kwargs, lambda bias: bias is layer.bias
            ):
                name, module = path, layer
        self.note_parameters(module, values)
        self.note(
            out,
            name=name,
            module=module,
            operands=operands,
            stored=self._stored.issuperset(read) and not _is_random(name),
            arguments=tuple(value for value in args if not isinstance(value, Tensor)),
            functional=module is not None,
            options={k: v for k, v in kwargs.items() if not isinstance(v, Tensor)},
            writes=writes,
            returned=source if has_form_of(out, returned) else None,
        )
        if not self._learned.isdisjoint(read):
            self._learned.update(map(id, tensors_in(out)))
        return out


def record(
    model: nn.Module,
    example: object,
    is_leaf: Callable[[nn.Module], bool] = is_torch_leaf,
    *,
    forward: Forward | None = None,
    watch: Mapping[nn.Module, Callable[[Any, Any, Any], None]] | None = None,
    tracker: ValueTracker | None = None,
    renewed: Iterable[nn.Module] = (),
) -> Flow:
    """Run ``model`` once on ``example``, in eval mode without gradients, and return its flow.

    Args:
        model: left unchanged.
        example: the arguments of the call; see :func:`call_arguments`.
        is_leaf: which modules count as one call.
        forward: called as ``forward(model, example)`` instead of the model itself.
        watch: module -> a function of its arguments, keyword arguments and result that is called
            before each of its calls, with None as the result, and after it, unrecorded.
        tracker: follows the values of the run; functions of ``watch`` may ask it.
        renewed: leaf modules whose result is a tensor of its own, also where they gave back what
            they read.
    """
    model = network_of(model)
    recorder = _Recorder(model, tracker, renewed)
    call = prepared_call(model, example, forward=forward)
    leaf = (recorder.begin_leaf, recorder.end_leaf)
    inner = (recorder.enter, recorder.leave)

    def hook(
        module: nn.Module, before: Callable[..., None], after: Callable[..., None]
    ) -> None:
        stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        # What the module's own hooks compute comes behind its call.
        end = module.register_forward_hook(after, with_kwargs=True, prepend=True)
        stack.enter_context(end)

    with ExitStack() as stack:
        stack.enter_context(random_kept())
        stack.enter_context(untouched(model))
        for module, see in (watch or {}).items():
            show = partial(recorder.show, see)
            hook(module, before=show, after=show)
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # They take no hooks.
            is_whole = is_leaf(module) and module is not model
            before, after = leaf if is_whole else inner
            hook(module, before, after)
        with recorder:
            out = call()
    return recorder.flow(out)
