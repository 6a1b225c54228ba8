"""Finding the operators in the forwards of modules, and putting quantizable modules there."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from torchq.graph import (
    KINDS,
    memory_of_nodes,
    operator_kind,
    operator_name,
    operator_of,
    overwrites,
    overwritten_values,
    read_arguments,
    reads_metadata,
    why_untraceable,
    writes,
)
from torchq.graph.operators import DROPOUTS
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.calls.find import Seen
from torchq.nn.calls.modules import noting_mode, recording_operators, trace_forward
from torchq.nn.calls.routes import Recorder
from torchq.nn.modules.operators import OPERATORS, stand_in
from torchq.utils import child_path, modules_with_names, state_kept

#: The module that stands for each kind of operator.
MODULES: dict[str, type[nn.Module]] = {
    kind: OPERATORS[name] for kind, name in KINDS.items()
}
#: Kinds of operators that are quantized in modules without a convolution too.
PRODUCTS = frozenset(["matmul", "attention"])
_LINEAR = (_ConvNd, nn.Linear, _BatchNorm)
#: What fusing leaves behind, and what evaluation mode removes.
_NOTHING = (nn.Identity, *DROPOUTS)
#: Classes that drop whole branches in training; a trace of torchvision's shows a call.
_DROPS_BRANCHES = frozenset(["StochasticDepth", "DropPath"])


@dataclass(frozen=True)
class OperatorSite:
    """One operator in the forward of ``owner``, where its ``child`` will stand.

    ``site`` says where it is; see :mod:`torchq.nn.calls.routes`. Of an addition, ``main`` is the
    operand (0 or 1) that comes straight from a convolution, linear layer or BatchNorm; the later
    one of two.
    """

    owner: nn.Module
    owner_names: tuple[str, ...]
    site: str
    kind: str
    child: str
    main: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Dotted paths of the child."""
        return tuple(child_path(name, self.child) for name in self.owner_names)

    def module(self) -> nn.Module:
        """Return a new float module that computes the operator."""
        return stand_in(MODULES[self.kind])


#: Why what overwrites a tensor is left as it is.
READ_AGAIN = "it overwrites a tensor that is read again through another name"
NO_RANGE = "an operand holds infinity, is sparse, or is computed inside torch.vmap"
#: A module whose operators cannot be found, its names, and why not.
Untraceable = tuple[nn.Module, tuple[str, ...], str]
#: An operator between tensors, before it has a name: its site -> kind and main operand.
_Candidates = dict[str, tuple[str, int | None]]


def find_operators(
    model: nn.Module, kinds: frozenset[str], seen: Seen | None = None
) -> tuple[list[OperatorSite], list[Untraceable]]:
    """Find operators between tensors in the forwards of all modules that are not torch's own.

    Operands that are numbers, parameters or buffers do not count. Each module is traced alone, so
    one that cannot be traced hides only its own operators; a run of the model shows these. An
    operator that overwrites a tensor which has another reader is not among them.
    """
    candidates: dict[int, _Candidates] = {}
    failed: dict[int, str] = {}
    hidden: dict[int, str] = {}
    read_again: dict[int, set[str]] = {}
    modules = [
        (names, m) for names, m in modules_with_names(model) if _is_of_the_user(m)
    ]
    for module in _with_own_code(modules):
        try:
            candidates[id(module)], read_again[id(module)], number = _traced(
                module, kinds
            )
            if number:
                hidden[id(module)] = (
                    f"its source does not show {number} of its operators"
                )
        except Exception as error:  # whatever the model's code raises on a Proxy
            failed[id(module)] = why_untraceable(error)
    if failed and seen is not None:
        shown = {
            key: _shown(model, kinds, seen, key) for key in failed if key in seen.visits
        }
        candidates |= shown
        by_id = {id(module): module for _, module in modules}
        failed = {
            key: f"{reason}; {words} in it {'stay' if ',' in words else 'stays'} float"
            for key, reason in failed.items()
            if key not in shown and (words := _words_missed(by_id[key], kinds, seen))
        }
    failed |= hidden
    for _, module in modules:
        # A run tells which tensors have other readers; without one, the trace does.
        names = read_again.get(id(module), set())
        if seen is not None:
            names = {name for key, name in seen.overwritten if key == id(module)}
        without_ranges = seen.without_ranges if seen is not None else ()
        infinite = {name for key, name in without_ranges if key == id(module)}
        remarks = [failed.get(id(module), "")]
        for left_out, reason in ((names, READ_AGAIN), (infinite, NO_RANGE)):
            found = candidates.get(id(module), {})
            gone = [name for name in left_out if found.pop(name, None)]
            if gone:
                plural = "s" if len(gone) > 1 else ""
                remarks.append(f"{len(gone)} operator{plural}: {reason}")
        if any(remarks):
            failed[id(module)] = "; ".join(filter(None, remarks))
    operators = [
        op for names, m in modules for op in _named(m, names, candidates.get(id(m), {}))
    ]
    untraceable = []
    for paths, module in modules:
        if id(module) in failed:
            untraceable.append((module, paths, failed[id(module)]))
    return operators, untraceable


def has_convolution(module: nn.Module) -> bool:
    """Return True for a module in which operators of all kinds are quantized."""
    return any(isinstance(part, _ConvNd) for part in module.modules())


def _words_missed(module: nn.Module, kinds: frozenset[str], seen: Seen) -> str:
    """Return which operators of a module stay float; "" if a run shows that it has none."""
    if id(module) not in seen.words:
        return "operators"
    wanted = kinds if has_convolution(module) else kinds & PRODUCTS
    return " and ".join(sorted(seen.words[id(module)] & wanted))


def modules_with_other_readers(model: nn.Module, seen: Seen | None = None) -> set[int]:
    """Return the ids of modules that overwrite a tensor which something else reads again."""
    if seen is not None:
        overwriting = {key for key, _ in seen.overwritten}
        modules = {key for key, name in seen.overwritten if not name}
        # What the forward of a layer of torch overwrites is all that the layer computes.
        return modules | {
            id(module)
            for module in model.modules()
            if id(module) in overwriting and _has_torchs_forward(module)
        }
    module_ids: set[int] = set()
    for _, module in modules_with_names(model):
        children = [
            child for child in module.children() if getattr(child, "inplace", False)
        ]
        if not children or not _is_of_the_user(module):
            continue
        try:
            graph = trace_forward(module, training=False)
        except Exception:  # whatever the model's code raises on a Proxy
            continue
        order = {node: number for number, node in enumerate(graph.nodes)}
        memory = memory_of_nodes(graph, module)
        for node in graph.find_nodes(op="call_module"):
            called = module.get_submodule(str(node.target))
            if any(called is child for child in children) and _is_read_later(
                node, order, memory
            ):
                module_ids.add(id(called))
    return module_ids


def _has_torchs_forward(module: nn.Module) -> bool:
    forward = type(module).forward
    return getattr(forward, "__module__", "").startswith("torch.nn.modules.")


def _is_of_the_user(module: nn.Module) -> bool:
    if isinstance(module, (QuantModule, TensorQuantizer, torch.jit.ScriptModule)):
        return False
    return not type(module).__module__.startswith(("torch.nn.", "torchq.nn."))


def _with_own_code(
    modules: list[tuple[tuple[str, ...], nn.Module]],
) -> Iterator[nn.Module]:
    """Yield the modules without Sequentials whose forward is that of torch.

    Half of the modules of torchvision's networks are such, and a trace of one shows no operator.
    """
    for _, module in modules:
        if not (isinstance(module, nn.Sequential) and _iterates_as_torch(module)):
            yield module


def _iterates_as_torch(module: nn.Sequential) -> bool:
    cls = type(module)
    has_forward_of_torch = cls.forward is nn.Sequential.forward
    has_forward_of_torch &= "forward" not in vars(module)
    return has_forward_of_torch and cls.__iter__ is nn.Sequential.__iter__


def _named(
    module: nn.Module, names: tuple[str, ...], candidates: _Candidates
) -> Iterator[OperatorSite]:
    counts: Counter[str] = Counter()
    for site, (kind, main) in candidates.items():
        child = f"quant_{kind}_{counts[kind]}".removesuffix("_0")
        counts[kind] += 1
        while hasattr(module, child):  # The author of the module has one of this name.
            child += "_"
        yield OperatorSite(module, names, site, kind, child, main)


# --- operators of a trace -----------------------------------------------------------------------


def _traced(
    module: nn.Module, kinds: frozenset[str]
) -> tuple[_Candidates, set[str], int]:
    """Return the operators that traces of the module find.

    Also those that overwrite a tensor with other readers, and how many its source does not show.
    Operators are named by their sites in the source, those of a graph module by its nodes.
    """
    candidates: _Candidates = {}
    read_again: set[str] = set()
    hidden = 0
    with (
        recording_operators([module]) as recorders,
        noting_mode(module) as mode,
        state_kept(module) as restore,
    ):
        recorder = recorders.get(id(module))
        for training in (False, True):
            if training and not mode.was_read:
                break  # The graph would be the same.
            graph = trace_forward(module, training, restore)
            named = _sites_of_nodes(recorder, graph)
            read_again |= _with_other_readers(module, graph, recorder)
            if isinstance(module, fx.GraphModule):
                named = {node: node.name for node in graph.nodes}
            nodes = _nodes_between_tensors(graph, kinds)
            hidden = max(hidden, sum(node not in named for node, _ in nodes))
            for node, kind in nodes:
                if node in named:
                    candidates[named[node]] = kind, _main_operand(module, node, kind)
    return candidates, read_again, hidden


def _with_other_readers(
    module: nn.Module, graph: fx.Graph, recorder: Recorder | None
) -> set[str]:
    """Return the sites that overwrite a tensor which the graph, or its caller, reads again."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    pairs = [(node, node.name) for node in order if _overwrites_first(node)]
    for visit in () if recorder is None else recorder.visits:
        node = getattr(visit.result, "node", None)
        if visit.is_in_place and node in order and visit.operands:
            # torch.fx writes ``x += y`` as ``x + y``, so the node itself does not tell.
            pairs.append((node, visit.name))
    if not pairs:
        return set()
    memory = memory_of_nodes(graph, module, {node for node, _ in pairs})
    return {name for node, name in pairs if _has_other_readers(node, order, memory)}


def _overwrites_first(node: fx.Node) -> bool:
    is_call = node.op in ("call_function", "call_method")
    return is_call and overwrites(node.target, node.kwargs)


def _has_other_readers(
    node: fx.Node, order: Mapping[fx.Node, int], memory: Mapping[fx.Node, set[fx.Node]]
) -> bool:
    """Return True if what ``node`` overwrites is read later, or belongs to the caller."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return True
    if any(root.op in ("placeholder", "get_attr") for root in memory[first]):
        return True
    return _is_read_later(node, order, memory)


def _is_read_later(
    node: fx.Node, order: Mapping[fx.Node, int], memory: Mapping[fx.Node, set[fx.Node]]
) -> bool:
    """Return True if what ``node`` overwrites is read later by an older name."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        return True
    return bool(overwritten_values(node, order, memory))


def _sites_of_nodes(recorder: Recorder | None, graph: fx.Graph) -> dict[fx.Node, str]:
    visits = [] if recorder is None else recorder.visits
    results = [(v.result, v.name) for v in visits if isinstance(v.result, fx.Proxy)]
    return {result.node: name for result, name in results if result.node.graph is graph}


def _nodes_between_tensors(
    graph: fx.Graph, kinds: frozenset[str]
) -> list[tuple[fx.Node, str]]:
    numbers: set[fx.Node] = set()
    stored: set[fx.Node] = set()
    fixed: set[fx.Node] = set()  # computed from numbers and stored tensors alone
    between = []
    for node in graph.nodes:
        if node.op != "placeholder" and all(
            source in fixed for source in _read_by(node)
        ):
            fixed.add(node)
        elif writes(node, None):
            fixed.clear()
        if _is_number(node, numbers):
            numbers.add(node)
        if node.op == "get_attr" or _is_number(node, numbers | stored):
            stored.add(node)
        is_call = node.op in ("call_function", "call_method")
        kind = operator_kind(node.target) if is_call else None
        # A factor that is a stored tensor, reshaped or not, needs no quantizer.
        constants = numbers | stored if kind == "mul" else numbers
        is_wanted = kind in kinds and node not in fixed
        if kind is not None and is_wanted and _is_between_tensors(node, constants):
            between.append((node, kind))
    return between


def _read_by(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose values a node reads, not only their shapes or types."""
    if _is_number(node, set()):
        return []
    if node.op == "call_module":
        return node.all_input_nodes
    sources: list[fx.Node] = []
    read = read_arguments(operator_name(node.target), node.args, dict(node.kwargs))
    fx.map_arg(read, sources.append)
    return sources


def _is_number(node: fx.Node, numbers: set[fx.Node]) -> bool:
    # Which makes a tensor of another type too.
    if reads_metadata(node) and node.target != "type":
        return True
    sources = node.all_input_nodes
    only_numbers = bool(sources) and all(source in numbers for source in sources)
    return only_numbers and node.op != "call_module"


def _is_between_tensors(node: fx.Node, numbers: set[fx.Node]) -> bool:
    row = operator_of(node.target)
    operands = None if row is None else row.operands(node.args, node.kwargs)
    return operands is not None and all(
        isinstance(o, fx.Node) and o.op != "get_attr" and o not in numbers
        for o in operands
    )


def _main_operand(module: nn.Module, node: fx.Node, kind: str) -> int | None:
    if kind != "add":
        return None
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    ends = [
        (order[o], i)
        for i, o in enumerate(node.args)
        if isinstance(o, fx.Node) and _ends_linear(module, o)
    ]
    return max(ends)[1] if ends else None


def _ends_linear(module: nn.Module, node: fx.Node) -> bool:
    """Return True for the call of a layer without activation, or of a module that returns one's."""
    if node.op != "call_module":
        return False
    called = module.get_submodule(str(node.target))
    while isinstance(called, nn.Sequential):
        parts = [part for part in called if not _does_nothing(part)]
        if not parts:
            break
        called = parts[-1]
    if _does_nothing(called) and node.all_input_nodes:
        return _ends_linear(module, node.all_input_nodes[0])
    return isinstance(called, _LINEAR) or _returns_linear(called)


def _returns_linear(module: nn.Module) -> bool:
    """Return True for a module of the user that returns the result of a layer as it is."""
    if not _is_of_the_user(module) or not any(module.children()):
        return False
    try:
        graph = trace_forward(module, training=False)
    except Exception:  # whatever the model's code raises on a Proxy
        return False
    (output,) = graph.find_nodes(op="output")
    result = output.args[0]
    return isinstance(result, fx.Node) and _ends_linear(module, result)


def _does_nothing(module: nn.Module) -> bool:
    """Return True for a module that returns its input after training."""
    return (
        isinstance(module, _NOTHING)
        or type(module).__name__ in _DROPS_BRANCHES
        or _gives_back(module)
    )


def _gives_back(module: nn.Module) -> bool:
    """Return True for a module of the user whose code returns its input as it is."""
    parts = (next(module.children(), None), next(module.parameters(), None))
    if parts != (None, None) or not _is_of_the_user(module):
        return False
    try:
        graph = trace_forward(module, training=False)
    except Exception:  # whatever the model's code raises on a Proxy
        return False
    return all(node.op in ("placeholder", "output") for node in graph.nodes)


# --- operators of a run -------------------------------------------------------------------------


def _shown(
    model: nn.Module, kinds: frozenset[str], seen: Seen, key: int
) -> _Candidates:
    """Return the operators that a run shows in a module that cannot be traced."""
    candidates: _Candidates = {}
    constants = {id(t) for t in (*model.parameters(), *model.buffers())}
    order = _linear_results(seen)
    for v in seen.visits[key]:
        if v.kind not in kinds or v.operands is None:
            continue
        if all(isinstance(o, Tensor) and id(o) not in constants for o in v.operands):
            ends = [
                (order.index(id(o)), i)
                for i, o in enumerate(v.operands)
                if id(o) in order
            ]
            main = max(ends)[1] if ends and v.kind == "add" else None
            candidates.setdefault(v.name, (v.kind, main))
    return candidates


def _linear_results(seen: Seen) -> list[int]:
    """Return the ids of results of linear layers that no other layer changed, in their order."""
    results: dict[int, None] = {}
    for result, module in seen.returned:
        is_layer = isinstance(module, _LINEAR) or not any(module.children())
        if is_layer and not (
            _does_nothing(module) or isinstance(module, nn.Sequential)
        ):
            results.pop(id(result), None)
            if isinstance(module, _LINEAR):
                results[id(result)] = None
    return list(results)
