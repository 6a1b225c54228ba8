"""Runtimes whose kernels run a calibrated model in this process, and what they are given.

To add one, write a file with a frozen dataclass that derives from :class:`Engine`, from
:class:`torchq.runtimes.onnx_engine.OnnxEngine` where it reads ONNX files, or from
:class:`torchq.runtimes.file_engine.FileEngine` where it reads others, and enter it in
``torchq/runtimes/__init__.py``. The contract in tests/contracts runs over the registry.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from torchq.errors import ExportError, TorchqError
from torchq.lowering.api import float_copy
from torchq.lowering.check import ReferenceCheck, call_once
from torchq.lowering.state import carried_state
from torchq.runtime import Runtime
from torchq.runtimes.export import OpenLengths, export_graph, lengths_to_try, probes
from torchq.runtimes.interface import GraphInterface
from torchq.runtimes.other_inputs import other_inputs
from torchq.utils.optional import import_optional

log = logging.getLogger(__name__)


class Task:
    """A calibrated model that nobody changes, and how it will be called; see ``deploy``."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        progress: bool = False,
        *,
        batches: Sequence[Any] = (),
        compares: bool = True,
    ) -> None:
        self.model, self.example, self.progress = model, example, progress
        self.batches = batches
        self.compares = compares and example is not None
        self._graphs: dict[object, tuple[Tensor, GraphInterface] | ExportError] = {}
        self._probes: dict[tuple[int, bool], list[ReferenceCheck]] = {}

    @cached_property
    def outcome(self) -> Any:
        """The results of the simulation for the example."""
        return self._first_call[0]

    @cached_property
    def _first_call(self) -> tuple[object, tuple[str, ...]]:
        """The results of the simulation for the example, and the state that it leaves behind."""
        return carried_state(self.model, self.example)

    @cached_property
    def checks(self) -> tuple[ReferenceCheck, ...]:
        """The results of the simulation for the example and for inputs of other values."""
        return tuple(self._checks_of(self.model)) if self.compares else ()

    @cached_property
    def float_checks(self) -> tuple[ReferenceCheck, ...]:
        """The same of the model as it was before it was quantized."""
        return tuple(self._checks_of(self.float_model)) if self.compares else ()

    def _checks_of(self, model: nn.Module) -> Iterator[ReferenceCheck]:
        outcome = self._first_call[0] if model is self.model else None
        yield ReferenceCheck(model, self.example, outcome=outcome)
        if self.batches:
            for number, batch in enumerate(self.batches):
                yield ReferenceCheck(model, batch, f"batch {number}")
            return
        for example in other_inputs(model, self.example):
            try:
                yield ReferenceCheck(model, example, "an input of other values")
            except Exception as error:  # a model may refuse numbers in any way it likes
                log.debug("the model does not run on other values: %s", error)
            else:
                return

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Buffers and attributes that one call leaves for the next."""
        return () if self.example is None else self._first_call[1]

    def require_no_state(self, label: str) -> None:
        """Raise an error where results depend on calls before, as those of a graph do not."""
        if self.state:
            names = ", ".join(self.state[:3])
            raise ExportError(
                f"deploy: target {label!r}: {names}: changes in a call and changes the next one; "
                "expected a model whose results depend on its arguments alone, as a graph holds "
                "one value. Pass the state as an argument and return it, or use target='torch'"
            )

    def line_of(self, result: nn.Module) -> str:
        """Return in a line how a deployed model was compared, and how far it agrees."""
        if self.example is None:
            return "not compared with the simulation: pass an example to deploy"
        if not self.compares:
            return "not compared with the simulation: check=False"
        deviations = "; ".join(check.found(result) for check in self.checks)
        return f"compared with the simulation on {deviations}"

    @cached_property
    def float_model(self) -> nn.Module:
        """The model as it was before it was quantized."""
        return float_copy(self.model)

    @cached_property
    def lengths(self) -> tuple[OpenLengths, ...]:
        """Sets of lengths that could stay open, the largest first."""
        return lengths_to_try(self.model, self.example)

    def checks_of_other_lengths(
        self, lengths: OpenLengths, *, quantized: bool = True
    ) -> list[ReferenceCheck]:
        """Return the results of the simulation, or of the float model, for other lengths."""
        model = self.model if quantized else self.float_model
        key = self.lengths.index(lengths)
        if (key, quantized) not in self._probes:
            checks = self._probes[key, quantized] = []
            for example in probes(model, self.example, lengths):
                try:
                    checks.append(
                        ReferenceCheck(model, example, "an example of another shape")
                    )
                except ExportError:
                    raise
                # A model may refuse a batch in any way it likes.
                except Exception as error:
                    log.debug("the model does not run on other lengths: %s", error)
        return self._probes[key, quantized]

    def _outcome(self, model: nn.Module) -> object:
        return self.outcome if model is self.model else call_once(model, self.example)

    def graph(
        self,
        runtime: Runtime | None,
        dynamo: bool,
        lengths: OpenLengths,
        *,
        for_all_inputs: bool = True,
    ) -> tuple[Tensor, GraphInterface]:
        """Return the model as an ONNX file for a runtime, or the float one for None."""
        file = None if runtime is None else runtime.file
        place = self.lengths.index(lengths)
        key = (runtime is None, file, dynamo, place, for_all_inputs)
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
                    for_all_inputs=for_all_inputs,
                )
            except ExportError as error:
                self._graphs[key] = error
        exported = self._graphs[key]
        if isinstance(exported, ExportError):
            raise exported
        return exported


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
