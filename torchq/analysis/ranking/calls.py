"""The calls of a model's modules in one run, in order, and what may stand for them in another."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import tensors_in
from torchq.nn import TensorQuantizer

__all__ = ["Call", "Forwards", "Key", "largest_before", "observe"]

#: A module, by id, and how many of its calls came before.
Key = tuple[int, int]
#: Is given a module, its forward and the arguments, and returns what the call returns.
Handler = Callable[[nn.Module, Callable[..., Any], Any, Any], Any]


@dataclass
class Call:
    """One call of a module.

    Attributes:
        key: the module, and which of its calls.
        enter: place of its begin among all begins and ends of calls.
        leave: place of its end.
        is_reusable: what it returned may stand for the call in a run with the same arguments.
        is_changed: later code changed the result in place.
        inside: how often each module was called during it, by id.
    """

    key: Key
    enter: int
    leave: int = -1
    is_reusable: bool = False
    is_changed: bool = False
    inside: Counter[int] = field(default_factory=Counter)


class Forwards:
    """The forwards of all modules of a model, which a handler can stand before.

    Hooks stay as they are: what a handler returns passes through them as any result does.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self.counts: Counter[int] = Counter()

    def key(self, module: nn.Module) -> Key:
        """Return the key of the call of ``module`` that begins, and count it."""
        number = self.counts[id(module)]
        self.counts[id(module)] += 1
        return id(module), number

    @contextmanager
    def handled(self, handler: Handler) -> Iterator[None]:
        """Give each call to ``handler`` inside a ``with`` block; counts begin at 0."""
        self.counts = Counter()
        with ExitStack() as stack:
            for module in self._modules:
                own = vars(module).get("forward")
                stack.callback(_put_back, module, own)
                object.__setattr__(module, "forward", _before(handler, module, module.forward))
            yield


def _before(handler: Handler, module: nn.Module, forward: Any) -> Callable[..., Any]:
    # Callers read the names of arguments from the signature, which `wraps` keeps.
    @functools.wraps(forward)
    def handled(*args: Any, **kwargs: Any) -> Any:
        return handler(module, forward, args, kwargs)

    return handled


def _put_back(module: nn.Module, own: Any) -> None:
    if own is None:
        vars(module).pop("forward", None)
    else:
        object.__setattr__(module, "forward", own)


def observe(forwards: Forwards, run: Callable[[], Any]) -> list[Call]:
    """Run a model and return its calls in the order of their begins."""
    calls: list[Call] = []
    returned: list[tuple[Call, Any, list[tuple[Tensor, int]]]] = []
    clock = itertools.count()

    def note(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        call = Call(forwards.key(module), next(clock))
        calls.append(call)
        before, given = forwards.counts.copy(), _versions((args, kwargs))
        result = forward(*args, **kwargs)
        call.leave, call.inside = next(clock), forwards.counts - before
        if _is_computing(module) and _are_unchanged(given):
            call.is_reusable = True
            returned.append((call, result, _versions(result)))
        return result

    with forwards.handled(note):
        run()
    for call, result, versions in returned:
        call.is_changed = not _are_unchanged(versions)
        call.is_reusable = isinstance(result, Tensor) or not call.is_changed
    return calls


def _is_computing(module: nn.Module) -> bool:
    """Return True for a module whose calls are worth keeping: one with parameters."""
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not isinstance(module, TensorQuantizer)


def _versions(value: Any) -> list[tuple[Tensor, int]]:
    return [(t, -1 if t.is_inference() else t._version) for t in tensors_in(value)]


def _are_unchanged(versions: list[tuple[Tensor, int]]) -> bool:
    return all(version in (-1, tensor._version) for tensor, version in versions)


def largest_before(calls: list[Call], place: int) -> dict[Key, Call]:
    """Return the calls that ended before ``place``, without those inside another one of them."""
    found: dict[Key, Call] = {}
    end = -1
    for call in calls:
        if call.is_reusable and end < call.enter and call.leave < place:
            found[call.key], end = call, call.leave
    return found
