"""What an engine is, what it is given, and the registry of engines.

To add one, write a file with a frozen dataclass that derives from :class:`Engine`, or from
:class:`torchq.engines.graph_engine.GraphEngine` where it reads ONNX files, decorate it with
``@register_engine``, and import the file in ``torchq/engines/__init__.py``. tests/engines runs its
conformance suite over the registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from torchq.engines.export import OpenLengths, export_graph, lengths_to_try, probes
from torchq.engines.interface import GraphInterface, Structure, flatten
from torchq.errors import ExportError
from torchq.graph import call_model
from torchq.lowering.api import float_copy
from torchq.lowering.check import ReferenceCheck
from torchq.utils import Registry


class Task:
    """A calibrated model that nobody changes, and how it will be called; see ``deploy``."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        batch_sizes: Sequence[int] = (),
        progress: bool = False,
    ) -> None:
        self.progress = progress
        self.model, self.example, self.batch_sizes = model, example, tuple(batch_sizes)
        self._graphs: dict[Any, tuple[Tensor, GraphInterface] | ExportError] = {}
        self._probes: dict[int, list[ReferenceCheck]] = {}

    @cached_property
    def check(self) -> ReferenceCheck:
        """The results of the simulation for the example."""
        return ReferenceCheck(self.model, self.example)

    @cached_property
    def float_model(self) -> nn.Module:
        """The model as it was before it was quantized."""
        return float_copy(self.model)

    @cached_property
    def lengths(self) -> tuple[OpenLengths, ...]:
        """Sets of lengths that could stay open, the largest first."""
        return lengths_to_try(self.model, self.example)

    def checks_of_other_lengths(self, lengths: OpenLengths) -> list[ReferenceCheck]:
        """Return the results of the simulation for inputs of other lengths."""
        key = self.lengths.index(lengths)
        if key not in self._probes:
            examples = probes(self.model, self.example, lengths)
            self._probes[key] = [ReferenceCheck(self.model, example) for example in examples]
        return self._probes[key]

    def structures_of_other_lengths(self, lengths: OpenLengths) -> list[Structure]:
        """Return the structure of the model's results for inputs of other lengths."""
        with torch.no_grad():
            examples = probes(self.model, self.example, lengths)
            return [flatten(call_model(self.model, example))[1] for example in examples]

    def graph(
        self, target: str | None, dynamo: bool, lengths: OpenLengths
    ) -> tuple[Tensor, GraphInterface]:
        """Return the model as an ONNX file; see :func:`export_graph`."""
        key = (target, dynamo, self.lengths.index(lengths))
        if key not in self._graphs:
            model = self.float_model if target is None else self.model
            try:
                self._graphs[key] = export_graph(
                    model, self.example, target=target, dynamo=dynamo, lengths=lengths
                )
            except ExportError as error:
                self._graphs[key] = error
        found = self._graphs[key]
        if isinstance(found, ExportError):
            raise found
        return found


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


def register_engine(name: str) -> Callable[[E], E]:
    """Return a decorator that enters an engine under ``name``.

    Raises:
        ConfigError: the name is taken.
    """

    def enter(cls: E) -> E:
        cls.name = name
        ENGINES.add(name, cls)
        return cls

    return enter
