"""Conversions of a model that are undone as a whole if one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torchq.nn.convert import change_class

__all__ = ["unchanged_on_error"]


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its classes, attributes, children and tensors back if the block raises.

    Every exception counts, also KeyboardInterrupt. Numbers that the block wrote into a tensor in
    place are not undone.

    Args:
        model: the block may convert its modules, and replace their attributes, children,
            parameters and buffers.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> try:
        ...     with unchanged_on_error(model):
        ...         report = torchq.quantize_(model)
        ...         raise KeyboardInterrupt
        ... except KeyboardInterrupt:
        ...     print(type(model[0]).__name__)
        Linear
    """
    before = [(module, type(module), dict(vars(module))) for module in model.modules()]
    containers = [
        (value, value.copy())
        for _, _, attributes in before
        for value in attributes.values()
        if isinstance(value, (dict, list, set))
    ]
    data = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            if type(module) is not cls:
                change_class(module, cls)
            vars(module).clear()
            vars(module).update(attributes)
        for value, content in containers:
            _refill(value, content)
        for parameter, tensor in data:
            parameter.data = tensor
        raise


def _refill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, list):
        value.extend(content)
    else:
        value.update(content)
