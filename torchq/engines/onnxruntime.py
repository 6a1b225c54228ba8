"""ONNX Runtime: integer kernels for convolutions and matrix products, on CPUs and GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchq.engines.graph_engine import GraphEngine, run_by_shape
from torchq.engines.interface import ReadGraph, Run, Shapes
from torchq.engines.registry import Engine, register_engine
from torchq.errors import ConfigError, ExportError
from torchq.onnx import inspect_onnx
from torchq.onnx.passes.pads import with_lengths
from torchq.utils.optional import import_optional

#: The setting ``provider`` -> the name in ONNX Runtime, and the target of its files.
_PROVIDERS = {
    "cpu": ("CPUExecutionProvider", "onnxruntime"),
    "cuda": ("CUDAExecutionProvider", "onnxruntime"),
    "tensorrt": ("TensorrtExecutionProvider", "tensorrt"),
}


@register_engine("onnxruntime")
@dataclass(frozen=True)
class OnnxRuntime(GraphEngine):
    """ONNX Runtime.

    Attributes:
        quantized: see :class:`Engine`.
        provider: whose kernels it uses: ``"cpu"``, ``"cuda"`` or ``"tensorrt"``. The last two need
            a GPU and the package onnxruntime-gpu.

    Example:
        >>> OnnxRuntime(provider="cpu").label
        'onnxruntime quantized'
    """

    provider: str = "cpu"

    def __post_init__(self) -> None:
        if self.provider not in _PROVIDERS:
            raise ConfigError(
                f"OnnxRuntime: got provider {self.provider!r}; expected one of "
                f"{', '.join(map(repr, _PROVIDERS))}"
            )

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; providers other than the CPU are named."""
        where = "" if self.provider == "cpu" else f" on {self.provider}"
        return f"{super().label}{where}"

    @property
    def target(self) -> str:
        """See :attr:`GraphEngine.target`."""
        return _PROVIDERS[self.provider][1]

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        for package in ("onnxruntime", "onnx", "onnx_ir"):
            runtime = import_optional(package, "deploy(engine='onnxruntime')")
        runtime = import_optional("onnxruntime", "deploy(engine='onnxruntime')")
        wanted, known = _PROVIDERS[self.provider][0], runtime.get_available_providers()
        if wanted not in known:
            raise ExportError(
                f"deploy: onnxruntime {runtime.__version__} has no {wanted}; expected it for "
                f"provider={self.provider!r}, but there is only {', '.join(known)}. Install "
                "onnxruntime-gpu on a machine with an NVIDIA GPU"
            )

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`."""
        return (
            OnnxRuntime(provider=self.provider),
            OnnxRuntime(quantized=False, provider=self.provider),
        )

    def open(self, read: ReadGraph, threads: int, usual: tuple[Shapes, ...] = ()) -> Run:
        """See :meth:`GraphEngine.open`.

        Usual shapes have graphs of their own where these have fewer nodes; fixed shapes alone are
        no faster here.
        """
        graph = read()
        own = [shapes for shapes in usual if with_lengths(graph, shapes) is not graph]

        def open_for(shapes: Shapes | None) -> Run:
            graph = read()
            return self._session(graph if shapes is None else with_lengths(graph, shapes), threads)

        return run_by_shape(open_for, own, any_batch=True)

    def _session(self, graph: bytes, threads: int) -> Run:
        """Return a file as a function of its inputs."""
        runtime = import_optional("onnxruntime", "deploy(engine='onnxruntime')")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # errors are raised; the log would repeat them
        # Of a file the session keeps the name; bytes it would keep beside what it makes of them.
        with _file_of(graph) as path:
            try:
                session = runtime.InferenceSession(
                    str(path), options, providers=[_PROVIDERS[self.provider][0]]
                )
            except Exception as error:  # the exception classes of ONNX Runtime are private
                raise ExportError(
                    f"deploy: onnxruntime {runtime.__version__} cannot run the model ({error}); "
                    "expected operators that it knows. Use another engine"
                ) from error

        def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
            # ONNX Runtime reads the memory of the tensors, and returns arrays of its own.
            arrays = {name: value.numpy() for name, value in feeds.items()}
            try:
                return [torch.from_numpy(array) for array in session.run(None, arrays)]
            except Exception as error:  # see above
                shapes = {name: array.shape for name, array in arrays.items()}
                raise ExportError(
                    f"onnxruntime: cannot run the model on inputs of shapes {shapes} ({error}); "
                    "expected shapes like those of the example"
                ) from error

        return run

    def placement(self, graph: bytes) -> str:
        """See :meth:`GraphEngine.placement`."""
        with _file_of(graph) as path:
            report = inspect_onnx(path)
        return f"{len(report.integer)} of {len(report.nodes)} computing nodes run on integers"


@contextmanager
def _file_of(graph: bytes) -> Iterator[Path]:
    """Yield a file with these bytes, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(graph)
        yield path
