"""Engines whose files run in sessions of ONNX Runtime, each through one of its providers."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from torchq.errors import ExportError
from torchq.onnx.passes.convolutions import with_lengths
from torchq.runtimes.file_engine import EngineModule, run_by_shape
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnx_engine import OnnxEngine, file_of
from torchq.runtimes.onnxruntime.inspect import inspect_onnx
from torchq.runtimes.onnxruntime.session import Session
from torchq.utils.optional import import_optional


@dataclass(frozen=True, kw_only=True, repr=False)
class SessionEngine(OnnxEngine):
    """An engine that ONNX Runtime calls the kernels of."""

    packages: tuple[str, ...] = ("onnxruntime", "onnx", "onnx_ir")

    @property
    @abstractmethod
    def execution_provider(self) -> str:
        """The name that ONNX Runtime has for the provider of these kernels."""

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        super().check()
        runtime = import_optional("onnxruntime", self._needed_by)
        available = runtime.get_available_providers()
        if self.execution_provider not in available:
            raise ExportError(
                f"deploy: onnxruntime {runtime.__version__} has no {self.execution_provider}; "
                f"expected it for {self.label!r}, but there is only {', '.join(available)}. "
                "Install onnxruntime-gpu on a machine with an NVIDIA GPU"
            )

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`FileEngine.open`.

        Usual shapes have a graph of their own where it has fewer nodes; fixed shapes alone are no
        faster here.
        """
        graph = read()
        fixed_shapes = usual if with_lengths(graph, usual) is not graph else ()

        def open_for(shapes: Shapes | None) -> Run:
            graph = read()
            return self._session(
                graph if shapes is None else with_lengths(graph, shapes), threads
            )

        return run_by_shape(open_for, fixed_shapes, any_batch=True)

    def _session(self, graph: bytes, threads: int) -> Run:
        """Return a file as a function of its inputs; the session keeps no copy of its bytes."""
        provider = self.execution_provider
        with file_of(graph) as path:
            try:
                return Session(
                    path, optimize=True, threads=threads, provider=provider
                ).run
            except ExportError as error:
                raise ExportError(f"deploy: {error}. Use another target") from error

    def integer_share(self, module: EngineModule) -> str:
        """See :meth:`FileEngine.integer_share`."""
        with file_of(module.graph_bytes()) as path:
            report = inspect_onnx(path)
        return f"{len(report.integer)} of {len(report.nodes)} computing nodes run on integers"
