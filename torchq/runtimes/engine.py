"""Runtimes whose kernels run a calibrated model in this process, and what they are given.

To add one, write a file with a frozen dataclass that derives from :class:`Engine`, or from
:class:`torchq.runtimes.graph_engine.GraphEngine` where it reads ONNX files, and enter it in
``torchq/runtimes/__init__.py``. The contract in tests/contracts runs over the registry.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.errors import ExportError, TorchqError
from torchq.graph import call_model
from torchq.lowering.api import float_copy
from torchq.lowering.check import ReferenceCheck
from torchq.runtime import Runtime
from torchq.runtimes.export import OpenLengths, export_graph, lengths_to_try, probes
from torchq.runtimes.interface import GraphInterface
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)


class Task:
    """A calibrated model that nobody changes, and how it will be called; see ``deploy``."""

    def __init__(self, model: nn.Module, example: Any, progress: bool = False) -> None:
        self.model, self.example, self.progress = model, example, progress
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
            self._probes[key] = []
            for example in probes(self.model, self.example, lengths):
                try:
                    self._probes[key].append(ReferenceCheck(self.model, example))
                except ExportError:
                    raise
                except Exception as error:  # a model may refuse a batch in any way it likes
                    log.debug("the model does not run on other lengths: %s", error)
        return self._probes[key]

    def _outcome(self, model: nn.Module) -> Any:
        if model is self.model:
            return self.check.outcome
        with torch.no_grad():
            return call_model(model, self.example)

    def graph(
        self, runtime: Runtime | None, dynamo: bool, lengths: OpenLengths
    ) -> tuple[Tensor, GraphInterface]:
        """Return the model as an ONNX file for a runtime, or the float one for None."""
        file = None if runtime is None else runtime.file
        key = (runtime is None, file, dynamo, self.lengths.index(lengths))
        if key not in self._graphs:
            model = self.float_model if runtime is None else self.model
            try:
                self._graphs[key] = export_graph(
                    model,
                    self.example,
                    self._outcome(model),
                    target=runtime,
                    dynamo=dynamo,
                    lengths=lengths,
                )
            except ExportError as error:
                self._graphs[key] = error
        found = self._graphs[key]
        if isinstance(found, ExportError):
            raise found
        return found


@dataclass(frozen=True, kw_only=True, repr=False)
class Engine(Runtime, ABC):
    """A runtime whose kernels are here: :func:`torchq.deploy` runs models on it.

    Attributes:
        quantized: False runs the model as it was before quantization.
    """

    #: Whether ``deploy(target="fastest")`` measures it.
    measured: ClassVar[bool] = True
    extra: ClassVar[str] = "export"
    quantized: bool = True

    @property
    def label(self) -> str:
        """The name of the runtime with the numbers that it computes with: ``torch quantized``."""
        return f"{self.name} {'quantized' if self.quantized else 'float'}"

    @property
    def _needed_by(self) -> str:
        return f"deploy(target={self.name!r})"

    def check(self) -> None:
        """Raise an error if this runtime cannot run on this machine.

        Raises:
            MissingExtraError: a package is not installed.
            ExportError: the runtime lacks something that its settings ask for.
        """
        for package in self.packages:
            import_optional(package, self._needed_by, self.extra)

    @property
    def here(self) -> bool:
        """See :attr:`torchq.runtime.Runtime.here`."""
        try:
            self.check()
        except TorchqError:
            return False
        return True

    @abstractmethod
    def build(self, task: Task) -> nn.Module:
        """Return a new module that computes what the model of ``task`` simulates.

        Raises:
            ExportError: the runtime cannot run the model, or its results differ.
        """

    def candidates(self) -> tuple[Engine, ...]:
        """Return the settings of this runtime that ``deploy(target="fastest")`` measures."""
        return self, replace(self, quantized=False)
