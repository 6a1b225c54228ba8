"""The base of engines that read an ONNX file: the export, and the check of what they compute."""

from __future__ import annotations

import logging
import tempfile
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from torchq.engines.as_written import runs_as_written
from torchq.engines.export import OpenLengths, tensor_shapes, with_rows
from torchq.engines.module import EngineModule, ReadGraph, Run, Shapes
from torchq.engines.registry import Engine
from torchq.engines.task import Task
from torchq.errors import ExportError, MissingExtraError
from torchq.lowering.onednn import saturates
from torchq.onnx import verify_onnx
from torchq.utils import progress_stages

__all__ = ["GraphEngine"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphEngine(Engine):
    """An engine that runs the file that :func:`torchq.export_onnx` writes for a target."""

    @property
    def device(self) -> torch.device:
        """Return where the tensors of a call have to be."""
        return torch.device("cpu")

    @property
    @abstractmethod
    def target(self) -> str:
        """The target of the exports that this engine reads; one of ``torchq.targets()``."""

    @abstractmethod
    def open(self, read: ReadGraph, threads: int, usual: tuple[Shapes, ...]) -> Run:
        """Return an ONNX file as a function of its inputs.

        Args:
            read: returns the file. The module holds it already, so a function that needs it later
                had better keep ``read`` than a copy.
            threads: the number of threads that compute one call.
            usual: the shapes of calls that will be common; others are possible too.

        Raises:
            ExportError: the engine cannot run the file.
        """

    @abstractmethod
    def placement(self, graph: bytes) -> str:
        """Return how many nodes run on integers, as text for the summary."""

    def faster_settings(self, graph: bytes) -> tuple[GraphEngine, ...]:
        """Return settings that run a file faster on this machine, where results stay right.

        :meth:`build` compares these, and takes the first ones that agree.

        Args:
            graph: the file.
        """
        return ()

    def build(self, task: Task) -> EngineModule:
        """See :meth:`Engine.build`. The exporter based on TorchScript is tried first: it is faster.

        A graph may have taken a length for a constant. So its results are compared for other
        lengths too, and it is exported with fewer open ones where they differ.
        """
        self.check()
        _require_float32(task.model)
        problems: list[ExportError] = []
        stages = (f"export for {self.label}",)
        with progress_stages("deploy", stages, enabled=task.progress):
            for dynamo, lengths in _attempts(task.lengths):
                try:
                    graph, interface = task.graph(
                        self.target if self.quantized else None, dynamo, lengths
                    )
                    module = EngineModule(self, graph, replace(interface, usual=_usual(task)))
                    found = task.check.difference(module)
                    if not found:
                        self.compare_lengths(module, task, lengths)
                        return self._faster(module, task, lengths)
                except ExportError as error:
                    log.debug("%s, dynamo=%s, %s: %s", self.label, dynamo, lengths, error)
                    problems.append(error)
                    continue
                self._accept(found, module, task)
                return module
        raise problems[0]

    def _faster(self, module: EngineModule, task: Task, lengths: OpenLengths) -> EngineModule:
        """Return the module with the faster settings that it agrees with, or as it is."""
        for settings in self.faster_settings(module.graph_bytes()):
            other = EngineModule(settings, module.graph, module.interface)
            try:
                if task.check.difference(other):
                    continue
                self.compare_lengths(other, task, lengths)
            except ExportError as error:
                log.debug("%s: %s", settings, error)
                continue
            return other
        return module

    def _accept(self, found: str, module: EngineModule, task: Task) -> None:
        """Warn about results that differ by more than is allowed, or raise an error.

        Args:
            found: which result differs, and by how much.
            module: the model on this engine.
            task: the model and the example.
        """
        text = f"deploy: engine {self.label!r}: {found}"
        if not self.quantized or not _file_agrees(module, task):
            raise ExportError(f"{text}. Use another engine")
        if not runs_as_written(module, task.model, task.example):
            raise ExportError(
                f"{text}, while the file agrees where it is run node by node: the engine computes "
                f"something else than its file says. {_advice()}"
            )
        warnings.warn(
            f"{text}, though every layer of the file agrees when given the same input: the model "
            "amplifies values that are rounded the other way at a tie. Its quantized results "
            "depend on the machine that computes them",
            stacklevel=4,
        )

    def compare_lengths(self, module: EngineModule, task: Task, lengths: OpenLengths) -> None:
        """Compare results for other lengths than those of the example.

        Args:
            module: the model on this engine.
            task: the model and the example.
            lengths: which lengths of the graph are open.

        Raises:
            ExportError: a result differs.
        """
        structure = module.interface.structure
        if any(other != structure for other in task.structures_of_other_lengths(lengths)):
            raise ExportError(
                f"deploy: engine {self.label!r}: for an example of another shape the model returns "
                "other numbers or another number of tensors beside its tensors; expected the same, "
                "as a graph holds those of the example"
            )
        for check in task.checks_of_other_lengths(lengths):
            problem = check.difference(module)
            if problem:
                raise ExportError(
                    f"deploy: engine {self.label!r}: for an example of another shape {problem}"
                )


def _advice() -> str:
    """Return what may help where an engine computes something else than its file says."""
    if saturates():
        return (
            "This CPU has no VNNI instructions, so that products of 8-bit weights can overflow. "
            "Quantize with torchq.recipes.int8(reduce_range=True)"
        )
    return "Use another engine"


def _usual(task: Task) -> tuple[Shapes, ...]:
    """Return the shapes of calls that will be common."""
    model, example = task.model, task.example
    sizes = (None, *task.batch_sizes)
    return tuple(tensor_shapes(model, with_rows(model, example, rows)) for rows in sizes)


def _attempts(lengths: tuple[OpenLengths, ...]) -> Iterator[tuple[bool, OpenLengths]]:
    """Yield what to try in order: which exporter, and which lengths are open."""
    exporters = (False, True)
    for dynamo in exporters:
        for opened in lengths[:-1]:
            yield dynamo, opened
    for dynamo in exporters:
        yield dynamo, lengths[-1]


def _file_agrees(module: EngineModule, task: Task) -> bool:
    """Return True if every layer of the file computes what the simulation does."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder, "model.onnx")
        path.write_bytes(module.graph_bytes())
        try:
            report = verify_onnx(task.model, path, [task.example])
        except (ExportError, MissingExtraError) as error:
            log.debug("the file could not be verified: %s", error)
            return False
        return bool(report.layers) and report.ok


def _require_float32(model: nn.Module) -> None:
    """Raise an error if a model computes in another dtype than float32."""
    found = next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float32)
    if found is not torch.float32:
        raise ExportError(
            f"deploy: got a model in {found}; expected float32, which other engines run. Call "
            "model.float() before calibrating, or use engine='torch'"
        )
