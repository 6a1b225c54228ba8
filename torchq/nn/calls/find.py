"""Finding the calls with weights in the forward of modules: by a run, or from their source.

A run records every call of :data:`~torchq.nn.calls.functions.FUNCTIONS` together with the module
whose forward makes it. A tensor that is computed from parameters alone is a weight; a tensor that
depends on the input of the run is data.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph import Operator, call_model, operator_of, tensors_in
from torchq.nn.calls.functions import CallSite, operand, product_of
from torchq.utils import evaluating

#: Why a layer of attention that calls torch's function cannot be quantized.
WHOLE_ATTENTION = "its forward calls F.multi_head_attention_forward as a whole"

_CHECKPOINTS = frozenset(["checkpoint", "checkpoint_seq", "checkpoint_sequential"])


@dataclass
class FoundCalls:
    """The calls that the forward of one module made in a run.

    Attributes:
        sites: Calls with a weight, and attention, in the order of their first call.
        ndims: For each site the number of dimensions of its weight; 0 for attention.
        forwards: For each forward of the module in the run: for each kind, how many calls had no
            parameter as weight. A module that several layers share has a forward for each.
        sources: Ids of the parameters that computed weights of calls depend on.
        below: The kinds that descendants of the module called.
        unreached: Names of other functions that got a weight -> what the forward does with it, as
            a clause. ``"embedding"`` looks it up, the others multiply by it.
        obstacle: Why the calls cannot be quantized; "" if they can.
    """

    sites: list[CallSite] = field(default_factory=list)
    ndims: list[int] = field(default_factory=list)
    forwards: list[Counter[str]] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    below: set[str] = field(default_factory=set)
    unreached: dict[str, str] = field(default_factory=dict)
    obstacle: str = ""

    def finished(self) -> FoundCalls:
        """Return the calls with totals filled in, and with obstacles that need all of them."""
        for kind in {site.kind for site in self.sites if not site.weight}:
            totals = sorted({forward[kind] for forward in self.forwards})
            if len(totals) > 1:
                self.obstacle = self.obstacle or (
                    f"its forward makes {totals[0]} calls of kind {kind} at one time and "
                    f"{totals[-1]} at another"
                )
        last = self.forwards[-1] if self.forwards else Counter[str]()
        self.sites = [s if s.weight else replace(s, total=last[s.kind]) for s in self.sites]
        if any(not site.weight and site.kind in self.below for site in self.sites):
            self.obstacle = self.obstacle or (
                "its forward computes the weight of a call beside children that make such calls too"
            )
        return self


class _Recorder(TorchFunctionMode):
    """Records calls with weights by the module whose forward is running."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.found: dict[int, FoundCalls] = {}
        self._stack: list[nn.Module] = []
        self._counts: list[Counter[str]] = []  # For each forward of the stack.
        self._parameters = {id(p) for p in root.parameters()}
        self._data: set[int] = set()
        self._weights: dict[int, frozenset[int]] = {}  # Tensor -> the parameters it depends on.
        self._alive: list[Any] = []  # An id is unique only as long as its tensor lives.

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Follow the forwards of all modules below ``root`` with hooks, until the block ends."""
        with ExitStack() as stack:
            for module in root.modules():
                enter = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                leave = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._stack:
            for tensor in tensors_in((args, kwargs)):
                self._alive.append(tensor)
                self._data.add(id(tensor))
        self._stack.append(module)
        self._counts.append(Counter())
        self.found.setdefault(id(module), FoundCalls()).forwards.append(self._counts[-1])

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
            self._counts.pop()

    def _origins(self, key: int) -> frozenset[int]:
        """Return the ids of the parameters that a tensor depends on, given its id."""
        return frozenset([key]) if key in self._parameters else self._weights.get(key, frozenset())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stack:
            self._record(func, args, kwargs)
        result = func(*args, **kwargs)
        ids = {id(tensor) for tensor in tensors_in((args, kwargs))}
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

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        owner, function = self._stack[-1], product_of(func, args)
        found = self.found[id(owner)]
        if func is F.multi_head_attention_forward:
            found.obstacle = WHOLE_ATTENTION
        site, ndim = (None, 0) if function is None else self._site(owner, function, args, kwargs)
        if site is None:
            found.unreached |= self._unreached(func, function, args, kwargs)
        if function is None:
            return
        for module in self._stack[:-1]:
            self.found[id(module)].below.add(function.word)
        if site is None or not site.weight:
            number = self._counts[-1][function.word]
            self._counts[-1][function.word] += 1
            site = site and replace(site, number=number)
        if site is not None and site not in found.sites:
            found.sites.append(site)
            found.ndims.append(ndim)

    def _unreached(
        self, func: Any, function: Operator | None, args: tuple[Any, ...], kwargs: dict[str, Any]
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
        if function is None or function.symmetric or function.word == "attention":
            return {}  # A matmul of two tensors that are no parameters need not have a weight.
        if id(operand(args, kwargs, function.right)) in self._data:
            return {function.word: f"computes the weight of {function.word} from its input"}
        return {function.word: f"calls {function.word} with a weight that is no parameter"}

    def _is_with_weight(self, arguments: Any) -> bool:
        """Return True if both data and a weight of several dimensions are among arguments."""
        tensors = list(tensors_in(arguments))
        weights = [t for t in tensors if t.dim() > 1 and self._origins(id(t))]
        return bool(weights) and any(id(t) in self._data for t in tensors)

    def _site(
        self, owner: nn.Module, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[CallSite | None, int]:
        if function.word == "attention":
            return CallSite("attention"), 0
        for left in (False, True) if function.symmetric else (False,):
            weight = operand(args, kwargs, function.left if left else function.right)
            data = operand(args, kwargs, function.right if left else function.left)
            if not isinstance(weight, Tensor) or id(data) not in self._data:
                continue
            if id(weight) in self._parameters:
                path = next((n for n, p in owner.named_parameters() if p is weight), "")
                if path:
                    return CallSite(function.word, path, weight_is_left=left), weight.dim()
            if origins := self._origins(id(weight)):
                self.found[id(owner)].sources |= origins
                return CallSite(function.word, weight_is_left=left), weight.dim()
        return None, 0


def find_calls(model: nn.Module, example: Any) -> dict[int, FoundCalls]:
    """Run ``model`` once on an example and return the calls of each module that ran."""
    recorder = _Recorder(model)
    with recorder.watching(model), evaluating(model), torch.no_grad(), recorder:
        call_model(model, example)
    for module in model.modules():
        if id(module) in recorder.found and _recomputes(type(module)):
            recorder.found[id(module)].obstacle = _RECOMPUTES
    return {key: found.finished() for key, found in recorder.found.items()}


_RECOMPUTES = (
    "its own code calls torch.utils.checkpoint, which would repeat calls without quantization"
)


def _code_of(cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the methods that classes outside torch define for ``cls``, by name."""
    for base in cls.__mro__:
        if not base.__module__.startswith("torch.nn."):
            for name, value in vars(base).items():
                if inspect.isfunction(value):
                    yield name, value


def _recomputes(cls: type) -> bool:
    return any(_CHECKPOINTS & set(function.__code__.co_names) for _, function in _code_of(cls))


def weights_read(module: nn.Module) -> list[str]:
    """Return the children whose weight the module's own forward passes to a function.

    This reads the source of ``forward`` and of the methods that it calls: ``F.linear(x,
    self.qkv.weight)`` names ``"qkv"``.
    """
    methods: dict[str, Callable[..., Any]] = {}
    for name, function in _code_of(type(module)):
        methods.setdefault(name, function)
    seen, todo, found = set(), ["forward"], []
    while todo:
        name = todo.pop()
        if name in seen or name not in methods:
            continue
        seen.add(name)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(methods[name])))
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        for call in [node for node in ast.walk(tree) if isinstance(node, ast.Call)]:
            called = _self_path(call.func)
            if called and "." not in called:
                todo.append(called)
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                path = _self_path(argument)
                if path.endswith(".weight"):
                    found.append(path.removesuffix(".weight"))
    children = dict(module.named_modules())
    return [path for path in dict.fromkeys(found) if path in children]


def _self_path(node: ast.AST) -> str:
    """Return ``a.b`` for the expression ``self.a.b``, else ""."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return ".".join(names) if isinstance(node, ast.Name) and node.id == "self" else ""
