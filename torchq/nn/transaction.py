"""Conversions of a model that are undone as a whole if one of them fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchq.nn.convert import change_class
from torchq.utils import undone_on_error


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
    classes = [(module, type(module)) for module in model.modules()]
    try:
        with undone_on_error(model):
            yield
    except BaseException:
        for module, cls in classes:
            if type(module) is not cls:
                change_class(module, cls)
        raise
