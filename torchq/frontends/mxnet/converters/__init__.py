"""The converters: importing this package enters them into the registry."""

from torchq.frontends.mxnet.converters import (  # noqa: F401
    arithmetic,
    layers,
    movement,
)
