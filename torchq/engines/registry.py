"""What an engine is, and the registry of them.

To add one, write a file with a frozen dataclass that derives from :class:`Engine`, or from
:class:`torchq.engines.graph_engine.GraphEngine` where it reads ONNX files, decorate it with
``@register``, and import the file in ``torchq/engines/__init__.py``. tests/engines runs its
conformance suite over the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import nn

from torchq.engines.task import Task
from torchq.utils import Registry

__all__ = ["ENGINES", "Engine", "register"]


@dataclass(frozen=True)
class Engine(ABC):
    """How a calibrated model is deployed: the library whose kernels run it, and its settings.

    Attributes:
        quantized: False runs the model as it was before quantization.
    """

    name: ClassVar[str]
    quantized: bool = True

    @property
    def label(self) -> str:
        """The name of the engine with the numbers that it computes with, such as ``torch int8``."""
        return f"{self.name} {'quantized' if self.quantized else 'float'}"

    @abstractmethod
    def check(self) -> None:
        """Raise an error if this engine cannot run on this machine.

        Raises:
            MissingExtraError: a package is not installed.
            ExportError: the engine lacks something that its settings ask for.
        """

    @abstractmethod
    def build(self, task: Task) -> nn.Module:
        """Return a new module that computes what the model of ``task`` simulates.

        Raises:
            ExportError: the engine cannot run the model, or its results differ.
        """

    def candidates(self) -> tuple[Engine, ...]:
        """Return the settings of this engine that ``engine="fastest"`` measures."""
        return (self,)


#: The engines by name.
ENGINES: Registry[str, type[Engine]] = Registry("engine")

E = TypeVar("E", bound=type[Engine])


def register(name: str) -> Callable[[E], E]:
    """Return a decorator that enters an engine under ``name``.

    Raises:
        ConfigError: the name is taken.
    """

    def enter(cls: E) -> E:
        cls.name = name
        ENGINES.add(name, cls)
        return cls

    return enter
