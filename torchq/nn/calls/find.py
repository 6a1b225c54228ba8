"""Finding the calls with weights in the forward of modules: by a run, or from their source.

A run records every product together with the module whose forward makes it, and with its place in
the code. A tensor that is computed from parameters alone is a weight; a tensor that depends on the
input of the run is data.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from torchq.graph import (
    OPERATORS,
    Operator,
    address_of,
    effects_of,
    function_name,
    operator_of,
    prepared_call,
    tensors_in,
    version_of,
)
from torchq.nn.calls.graphs import noting_ranges
from torchq.nn.calls.modules import recording_operators, rewritten
from torchq.nn.calls.overwrites import Overwrites
from torchq.nn.calls.routes import (
    MARK,
    CallSite,
    Recorder,
    Visit,
    have_memory,
    operand,
    product_of,
)
from torchq.nn.convert import QuantModule
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import is_torchs_own, untouched

#: Why a layer of attention that calls torch's function cannot be quantized.
WHOLE_ATTENTION = "its forward calls F.multi_head_attention_forward as a whole"

#: What the forward of a layer of transformers does.
ATTENTION_OUTSIDE = "hands its attention to a function outside of it"


@dataclass
class FoundCalls:
    """The calls that the forward of one module made in a run.

    Attributes:
        sites: Calls with a weight, and attention, in the order of their first call -> the number of
            dimensions of the weight; 0 for attention.
        operations: Place of each of these calls -> the operations in it, as torch counts them.
        sources: Ids of the parameters that computed weights of calls depend on.
        unreached: Names of other functions that got a weight -> a clause on what becomes of it.
        unseen: Products in its source that the run has not made.
        obstacle: Why the calls cannot be quantized; "" if they can.
    """

    sites: dict[CallSite, int] = field(default_factory=dict)
    operations: Counter[str] = field(default_factory=Counter)
    sources: set[int] = field(default_factory=set)
    unreached: dict[str, str] = field(default_factory=dict)
    unseen: list[CallSite] = field(default_factory=list)
    obstacle: str = ""

    def add(self, site: CallSite, ndim: int) -> None:
        """Enter a call of the run."""
        earlier = next((other for other in self.sites if other.site == site.site), None)
        if earlier is None:
            self.sites[site] = ndim
        elif earlier != site:
            self.obstacle = self.obstacle or _CHANGES

    def note_unseen(self, module: nn.Module, places: set[str]) -> None:
        """Enter the products in the source of the module that are not at one of these places."""
        for site in rewritten(type(module)).sites if self.sites else ():
            row = OPERATORS[site.operator]
            name = MARK + site.name
            if row.layer and row.word != "attention" and name not in places:
                self.unseen.append(CallSite(row.word, site=name, is_unseen=True))


@dataclass(frozen=True)
class Seen:
    """What one run of a model shows of the forwards of its modules, each by the id of the module.

    Attributes:
        calls: the calls of each module that ran.
        visits: the operators of each module whose source tells their places.
        returned: the result of each call of a module, in order, and the module. Tensors are known
            by their ids, and live as long as these are told apart.
        overwritten: the operators, by the id of the module and the name of the site, and the
            modules, by their id and "", that overwrite a tensor which is read again.
        written_weights: ids of modules whose weight was written, or set, before they were called.
        without_ranges: the operators with infinite operands, or with some that have no memory: the
            id of the module, and the name of the site.
        without_memory: ids of modules that were given sparse tensors, or ran in ``torch.vmap``.
        words: the words of the operators between tensors of data that each module computed itself,
            whether its source tells their places or not.
    """

    calls: Mapping[int, FoundCalls]
    visits: Mapping[int, Sequence[Visit]]
    returned: Sequence[tuple[object, nn.Module]]
    overwritten: Set[tuple[int, str]] = frozenset()
    written_weights: Set[int] = frozenset()
    without_memory: Set[int] = frozenset()
    without_ranges: Set[tuple[int, str]] = frozenset()
    words: Mapping[int, Set[str]] = field(default_factory=dict)


_CHANGES = (
    "its forward multiplies by one weight at one time and by another one at another"
)


class _Recorder(TorchFunctionMode):
    """Records calls with weights by the module whose forward is running."""

    def __init__(
        self,
        root: nn.Module,
        routes: Mapping[int, Recorder],
        overwrites: Overwrites,
        operations: Callable[[], int],
    ) -> None:
        super().__init__()
        self._overwrites = overwrites
        self._operations = operations
        self.found: dict[int, FoundCalls] = {}
        self._routes = (
            routes  # By id of modules whose source tells the places of calls.
        )
        self._stack: list[nn.Module] = []
        self._parameters = {id(p) for p in root.parameters()}
        self.without_memory: set[int] = set()
        # Ids of modules whose weight is not the one before the run.
        self.written: set[int] = set()
        self._weights_before = {
            id(module): _weight_of(module) for module in root.modules()
        }
        self.read: set[int] = set()  # Ids of parameters that a function of torch got.
        self._data: set[int] = set()
        # Tensor -> the parameters it depends on.
        self._weights: dict[int, frozenset[int]] = {}
        self._alive: list[
            object
        ] = []  # An id is unique only as long as its tensor lives.
        self.returned: list[tuple[object, nn.Module]] = []
        self.words: dict[int, set[str]] = {}

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Follow the forwards of all modules below ``root`` with hooks, until the block ends."""
        with ExitStack() as stack:
            for module in root.modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue  # They take no hooks.
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, module: nn.Module, args: object, kwargs: object) -> None:
        if not self._stack:
            for tensor in tensors_in((args, kwargs)):
                self._alive.append(tensor)
                self._data.add(id(tensor))
        if _weight_of(module) != self._weights_before.get(id(module)):
            self.written.add(id(module))
        if not have_memory((args, kwargs)):
            self.without_memory.add(id(module))
        self._stack.append(module)
        self.found.setdefault(id(module), FoundCalls())
        self.words.setdefault(id(module), set())

    def _leave(self, module: nn.Module, args: Sequence[object], result: Any) -> object:
        if getattr(module, "inplace", False) is True and any(result is a for a in args):
            result = self._overwrites.handed_on(result, (id(module), ""))
            if id(args[0]) in self._data:
                self._data.add(id(result))
        self._overwrites.note_returned(result)
        self.returned.append((result, module))
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
        return result

    def _origins(self, key: int) -> frozenset[int]:
        """Return the ids of the parameters that a tensor depends on, given its id."""
        return (
            frozenset([key])
            if key in self._parameters
            else self._weights.get(key, frozenset())
        )

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        place = self._record(func, args, kwargs) if self._stack else ""
        self._overwrites.note_read(func, (args, kwargs))
        before = self._operations() if place else 0
        result = func(*args, **kwargs)
        if place:
            calls = self.found[id(self._stack[-1])]
            calls.operations[place] += self._operations() - before
        self._overwrites.note_made(result)
        ids = {id(tensor) for tensor in tensors_in((args, kwargs))}
        if "metadata" not in effects_of(function_name(func)):
            self.read |= ids & self._parameters
        is_data = bool(ids & self._data)
        origins = frozenset[int]().union(*map(self._origins, ids))
        for tensor in tensors_in(result) if is_data or origins else ():
            if id(tensor) not in self._parameters:
                self._alive.append(tensor)
                if is_data:
                    self._data.add(id(tensor))
                else:
                    self._weights[id(tensor)] = origins
        return result

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, object]
    ) -> str:
        """Enter a call of the running module; return its place if its weight can be quantized."""
        owner = self._stack[-1]
        self._note_word(owner, func, args, kwargs)
        function = product_of(func, args)
        calls = self.found[id(owner)]
        if func is F.multi_head_attention_forward:
            calls.obstacle = WHOLE_ATTENTION
        site, ndim = (
            (None, 0) if function is None else self._site(owner, function, args, kwargs)
        )
        if site is None:
            calls.unreached |= self._unreached(func, function, args, kwargs)
            return ""
        place = self._routes[id(owner)].current if id(owner) in self._routes else ""
        # Its nodes have names, and none is routed.
        if isinstance(owner, fx.GraphModule):
            place = f"node {len(calls.sites)}"
        if not have_memory((args, kwargs)):
            use = f"calls {site.kind} with a weight inside torch.vmap, or on sparse tensors"
            calls.unreached[site.kind] = use
            return ""
        if not place:
            use = f"calls {site.kind} with a weight, which its source does not show"
            if site.kind == "attention":
                use = ATTENTION_OUTSIDE
            calls.unreached[site.kind] = use
            return ""
        calls.add(replace(site, site=place), ndim)
        return place

    def _note_word(
        self,
        owner: nn.Module,
        func: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        row = operator_of(func)
        operands = row.operands(args, kwargs) if row and row.module else None
        if row and operands and all(id(tensor) in self._data for tensor in operands):
            self.words[id(owner)].add(row.word)

    def _unreached(
        self,
        func: object,
        function: Operator | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> dict[str, str]:
        """Return the name of a function that gets a weight in a call without a site -> a clause."""
        if func in (F.embedding, F.embedding_bag):
            is_parameter = self._origins(id(operand(args, kwargs, (1, "weight"))))
            clause = f"looks up rows of a parameter with F.{func.__name__}"
            return {"embedding": clause} if is_parameter else {}
        row = operator_of(func)
        if row and "product" in row.effects and self._is_with_weight((args, kwargs)):
            name = row.name
            return {name: f"multiplies by a weight in {name}"}
        if type(func).__module__ == "torch._ops" and self._is_with_weight(
            (args, kwargs)
        ):
            # Such as torchvision.deform_conv2d.
            return {str(func): f"hands a weight to {func}"}
        if any(tensor.is_complex() for tensor in tensors_in((args, kwargs))):
            name = "a product" if function is None else function.word
            is_weighted = self._is_with_weight((args, kwargs))
            return (
                {name: f"multiplies complex numbers in {name}"} if is_weighted else {}
            )
        if function is None or function.symmetric or function.word == "attention":
            return {}  # A matmul of two tensors that are no parameters need not have a weight.
        if id(operand(args, kwargs, function.right)) in self._data:
            return {
                function.word: f"computes the weight of {function.word} from its input"
            }
        return {
            function.word: f"calls {function.word} with a weight that is no parameter"
        }

    def _is_with_weight(self, arguments: object) -> bool:
        """Return True if both data and a weight of several dimensions are among arguments."""
        tensors = list(tensors_in(arguments))
        weights = [t for t in tensors if t.dim() > 1 and self._origins(id(t))]
        return bool(weights) and any(id(t) in self._data for t in tensors)

    def _site(
        self,
        owner: nn.Module,
        function: Operator,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[CallSite | None, int]:
        if function.word == "attention":
            return CallSite("attention"), 0
        for is_left in (False, True) if function.symmetric else (False,):
            weight = operand(args, kwargs, function.left if is_left else function.right)
            data = operand(args, kwargs, function.right if is_left else function.left)
            if not isinstance(weight, Tensor) or id(data) not in self._data:
                continue
            if weight.is_complex() or data.is_complex():
                continue
            if id(weight) in self._parameters:
                path = next((n for n, p in owner.named_parameters() if p is weight), "")
                if path:
                    return CallSite(
                        function.word, path, weight_is_left=is_left
                    ), weight.dim()
            if origins := self._origins(id(weight)):
                self.found[id(owner)].sources |= origins
                return CallSite(function.word, weight_is_left=is_left), weight.dim()
        return None, 0


def find_calls(
    model: nn.Module, example: object, operations: Callable[[], int] = lambda: 0
) -> Seen:
    """Run ``model`` once on an example and return what its modules called.

    ``operations`` tells how many there were so far, where someone counts them.
    """
    modules = [
        m for m in model.modules() if not isinstance(m, (QuantModule, TensorQuantizer))
    ]
    overwrites = Overwrites()
    call = prepared_call(model, example)
    with (
        untouched(model),
        recording_operators(modules, overwrites) as routes,
        noting_ranges(modules) as without_ranges_in_graphs,
    ):
        recorder = _Recorder(model, routes, overwrites, operations)
        with recorder.watching(model), recorder:
            call()
    for module in modules:
        calls = recorder.found.get(id(module))
        if calls is not None and id(module) in routes:
            calls.note_unseen(module, routes[id(module)].places)
        if calls is not None and _hides_weight(module, recorder.read):
            calls.unreached["weight"] = (
                "hands its weight to an operator that is none of torch's"
            )
    visits = {key: route.visits for key, route in routes.items() if route.visits}
    owners = {id(route): key for key, route in routes.items()}
    without_ranges = {
        (key, name) for key, route in routes.items() for name in route.without_ranges
    }
    without_ranges |= without_ranges_in_graphs
    overwritten = {(owners.get(key, key), name) for key, name in overwrites.read_again}
    return Seen(
        recorder.found,
        visits,
        recorder.returned,
        overwritten,
        recorder.written,
        recorder.without_memory,
        without_ranges,
        recorder.words,
    )


def _weight_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Return what tells whether the weight of a module is another one, or was written.

    A weight that is no parameter before the run is one that hooks of torch compute.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        return None if hasattr(module, "weight") else (0, 0, 0)
    has_memory = not is_lazy(weight) and address_of(weight) is not None
    return id(weight), weight.data_ptr() if has_memory else 0, version_of(weight)


def _hides_weight(module: nn.Module, read: Set[int]) -> bool:
    """Return True for a layer outside torch whose weight no function of torch got in the run."""
    weight = getattr(module, "weight", None)
    is_leaf = next(module.children(), None) is None and not is_torchs_own(module)
    is_weight = isinstance(weight, nn.Parameter) and weight.dim() > 2
    return is_leaf and is_weight and id(weight) not in read


def weighted_calls(module: nn.Module) -> Iterator[CallSite]:
    """Yield the calls whose weight the source of the module's forward shows, as ``qkv.weight``."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for site in rewritten(type(module)).sites:
        row = OPERATORS[site.operator]
        for path in (site.right, site.left) if row.symmetric else (site.right,):
            if row.layer and path in parameters:
                is_left = row.symmetric and path == site.left
                yield CallSite(
                    row.word, path, weight_is_left=is_left, site=MARK + site.name
                )
                break
