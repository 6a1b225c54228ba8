"""What a model keeps from one call to the next, which no graph does."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model, tensors_in
from torchq.nn import TensorQuantizer
from torchq.utils import RandomState, child_path, same_numbers, state_kept

#: Attributes that every module has; what they hold is looked at by name.
_COMMON = frozenset(vars(nn.Module()))


def carried_state(model: nn.Module, example: object) -> tuple[Any, tuple[str, ...]]:
    """Return what a call returns, and what it changes that changes the next call.

    These are buffers and attributes. What a call only notes, such as a cache of masks, changes no
    result. The model and the random numbers stay as they are.
    """
    start = RandomState.now()
    with torch.no_grad(), state_kept(model):
        before = dict(_state(model))
        outcome = call_model(model, example)
        after = dict(_state(model))
        changed = [
            name for name, value in after.items() if not _same(before.get(name), value)
        ]
        start.restore()
        if not changed:
            return outcome, ()
        first = [tensor.clone() for tensor in tensors_in(outcome)]
        second = list(tensors_in(call_model(model, example)))
    start.restore()
    equal = len(first) == len(second) and all(map(_same, first, second))
    return outcome, () if equal else tuple(changed)


def _state(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield buffers and attributes of all modules by their paths, as copies."""
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            continue
        attributes = {
            name: value for name, value in vars(module).items() if name not in _COMMON
        }
        for name, value in {**attributes, **module._buffers}.items():
            full = child_path(path, name)
            if isinstance(value, Tensor):
                yield full, value.detach().clone()
            else:
                yield (
                    full,
                    value.copy() if isinstance(value, (dict, list, set)) else value,
                )


def _same(one: object, other: object) -> bool:
    """Return True if two values are equal, or one object; NaN equals itself."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_numbers(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(
            _same(one[key], other[key]) for key in one
        )
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # Objects compare themselves in any way they like.
        return False


def sets_attributes(module: nn.Module) -> bool:
    """Return True if the forward of a module of a user sets an attribute of the module."""
    cls = type(module)
    if cls.__module__.startswith(("torch.", "torchq.")):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.forward)))
    except (OSError, TypeError, SyntaxError):  # There is no source to read.
        return False
    return any(_is_set(node) for node in ast.walk(tree))


def _is_set(node: ast.AST) -> bool:
    """Return True for an attribute of ``self``, or an element of one, that is assigned."""
    if not isinstance(node, (ast.Attribute, ast.Subscript)) or not isinstance(
        node.ctx, ast.Store
    ):
        return False
    base: Any = node
    while isinstance(base, ast.Subscript):
        base = base.value
    is_attribute = isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name)
    return is_attribute and base.value.id == "self"
