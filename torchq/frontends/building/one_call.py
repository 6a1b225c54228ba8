"""Functions of which a call stays one node, whatever traces the code that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import fx

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "_is_one_call"


def one_call(function: _Function) -> _Function:
    """Return ``function`` such that torch.fx notes a call of it as one node, as of torch's own.

    ``torch.fx.wrap`` does so too, but for one module's globals at a time. Each copy of a network
    that was read has globals of its own, and torch would keep those for ever, and change and
    restore all of them whenever anything is traced.
    """

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        proxy = next(_proxies_in((args, kwargs)), None)
        if proxy is None:
            return function(*args, **kwargs)
        return proxy.tracer.create_proxy("call_function", call, args, kwargs)

    setattr(call, _MARK, True)
    return cast("_Function", call)


def is_one_call(function: object) -> bool:
    """Return True for what :func:`one_call` has made."""
    return hasattr(function, _MARK)


def _proxies_in(value: object) -> Iterator[fx.Proxy]:
    if isinstance(value, fx.Proxy):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _proxies_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from _proxies_in(item)
    elif isinstance(value, slice):
        yield from _proxies_in((value.start, value.stop, value.step))
