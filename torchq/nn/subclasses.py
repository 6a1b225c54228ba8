"""Classes that compute what their base computes: plain subclasses, and parametrized classes.

:mod:`torch.nn.utils.parametrize` gives a module a class of its own, whose properties compute the
parametrized tensors. Such a module is quantized as a module of its former class: the weight is
quantized after the parametrization, as if the module had been parametrized last.
"""

import inspect
import types
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

# What decides the result of a module, beside the methods that its class adds to nn.Module.
_COMPUTING = frozenset(
    ["forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__"]
)
# What a subclass may change of its base and still compute the same.
_INITIALISING = frozenset(
    ["extra_repr", "from_pretrained", "reset_parameters", "reset_running_stats"]
    + ["_fill_padding_idx_with_zero", "_reset_parameters"]
)


def changes_nothing(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return True if a subclass has no method that computes, and no property for weight or bias."""
    added = {name for name in set(dir(base)) - set(dir(nn.Module)) if not name.startswith("__")}
    return all(
        inspect.getattr_static(cls, name, None) is inspect.getattr_static(base, name, None)
        for name in (added | _COMPUTING) - _INITIALISING | {"weight", "bias"}
    )


def is_parametrized_class(cls: type[Any]) -> bool:
    """Return True if torch made ``cls`` for one module with parametrizations."""
    return any(
        isinstance(value, property) and value.fget.__module__ == parametrize.__name__
        for value in vars(cls).values()
    )


def unparametrized(cls: type[Any]) -> type[Any]:
    """Return the class that a module had before its parametrizations; ``cls`` if it has none."""
    return cls.__bases__[0] if is_parametrized_class(cls) else cls


def parametrized_like(cls: type[Any], example: type[Any]) -> type[Any]:
    """Return a class below ``cls`` with the parametrized tensors of ``example``, as torch's."""
    body = {
        key: value for key, value in vars(example).items() if key not in ("__dict__", "__weakref__")
    }
    name = f"Parametrized{cls.__name__}"
    return types.new_class(name, (cls,), {}, lambda space: space.update(body))


def class_below(bases: tuple[type[Any], ...], name: str, doc: str, **body: Any) -> type[Any]:
    """Return a class for modules whose ``float_class``, and module, is the last of ``bases``."""
    cls = bases[-1]
    body |= {"float_class": cls, "__doc__": doc, "__module__": cls.__module__}
    return types.new_class(name, bases, {}, lambda space: space.update(body))
