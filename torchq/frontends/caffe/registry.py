"""The layers that can be converted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchq.frontends.building import Value, entering
from torchq.frontends.caffe.node import CaffeLayer
from torchq.utils import Registry

Converter = Callable[[CaffeLayer], "Value | Sequence[Value]"]

#: From the type of a layer to its converter.
CONVERTERS: Registry[str, Converter] = Registry("Caffe layer")


def converter(*types: str) -> Callable[[Converter], Converter]:
    """Enter the decorated function as the converter of types of layers.

    Args:
        types: names such as ``"Convolution"``.

    Raises:
        ConfigError: one of the types has a converter already.
    """
    return entering(CONVERTERS, types)
