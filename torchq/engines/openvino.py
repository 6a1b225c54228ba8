"""OpenVINO: integer kernels of Intel's library, on x86 and Arm CPUs."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchq.engines.export import OpenLengths
from torchq.engines.graph_engine import EngineModule, GraphEngine, run_by_shape
from torchq.engines.interface import ReadGraph, Run, Shapes
from torchq.engines.registry import Engine, Task, register_engine
from torchq.errors import ConfigError, ExportError
from torchq.onnx.passes.pads import with_lengths
from torchq.onnx.targets.openvino import with_signed_codes
from torchq.utils.optional import import_optional

_NEEDED_BY = "deploy(engine='openvino')"
#: The setting ``precision`` -> the hint of OpenVINO.
_PRECISIONS = ("f32", "bf16", "f16")
#: Layers of a compiled graph that compute; the others move data and lengths.
_COMPUTING = frozenset(
    [
        *("Convolution", "Deconvolution", "FullyConnected", "MatMul", "Pooling", "Eltwise"),
        *("MVN", "Softmax", "Reduce", "Interpolate", "ScaledDotProductAttention", "Subgraph"),
        *("RNNSeq", "LSTMSequence", "Math"),
    ]
)


@register_engine("openvino")
@dataclass(frozen=True)
class OpenVino(GraphEngine):
    """OpenVINO on the CPU.

    Attributes:
        quantized: see :class:`Engine`.
        precision: of what is not quantized. By itself OpenVINO computes in bfloat16 on CPUs that
            can, with errors of a few percent; here the default is ``"f32"``.
        signed_codes: run unsigned codes with the zero point 128 as signed ones on CPUs that read
            these, see :func:`reads_signed_codes`; no effect on others. With None, results
            decide when the model is deployed.

    Example:
        >>> OpenVino(quantized=False, precision="bf16").label
        'openvino float bf16'
    """

    precision: str = "f32"
    signed_codes: bool | None = None

    def __post_init__(self) -> None:
        if self.precision not in _PRECISIONS:
            raise ConfigError(
                f"OpenVino: got precision {self.precision!r}; expected one of "
                f"{', '.join(map(repr, _PRECISIONS))}"
            )

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; precisions other than float32 are named."""
        precision = "" if self.precision == "f32" else f" {self.precision}"
        return f"{super().label}{precision}"

    @property
    def target(self) -> str:
        """See :attr:`GraphEngine.target`."""
        return "openvino"

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        import_optional("openvino", _NEEDED_BY, "openvino")
        for package in ("onnx", "onnx_ir"):
            import_optional(package, _NEEDED_BY)

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`; bfloat16 only where the CPU multiplies it."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        capabilities = runtime.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        found: list[Engine] = []
        for precision in ("f32", "bf16") if "BF16" in capabilities else ("f32",):
            found += [OpenVino(q, precision=precision) for q in (True, False)]
        return tuple(found)

    def open(self, read: ReadGraph, threads: int, usual: tuple[Shapes, ...] = ()) -> Run:
        """See :meth:`GraphEngine.open`. Usual shapes have graphs of their own, which are faster."""

        def open_for(shapes: Shapes | None) -> Run:
            run = _bound(self._compile(self._for_this_cpu(read()), threads, shapes))
            return run if shapes is not None else _refusing(run, read, usual)

        return run_by_shape(open_for, usual)

    def compare_lengths(self, module: EngineModule, task: Task, lengths: OpenLengths) -> None:
        """See :meth:`GraphEngine.compare_lengths`.

        In a module of its own: the graph for other lengths is as large as that for usual shapes,
        and opened again once a call needs it.
        """
        apart = EngineModule(module.settings, module.graph, module.interface)
        super().compare_lengths(apart, task, lengths)

    def faster_settings(self, graph: bytes) -> tuple[GraphEngine, ...]:
        """See :meth:`GraphEngine.faster_settings`."""
        undecided = self.signed_codes is None and self.quantized
        if undecided and reads_signed_codes() and with_signed_codes(graph) is not graph:
            return (replace(self, signed_codes=True),)
        return ()

    def _for_this_cpu(self, graph: bytes) -> bytes:
        """Return the file with the codes that this CPU is fastest with."""
        signed = self.signed_codes and reads_signed_codes()
        return with_signed_codes(graph) if signed else graph

    def _compile(self, graph: bytes, threads: int, shapes: Shapes | None) -> Any:
        """Return the compiled graph, for inputs of these shapes or with open lengths."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        settings = {
            # A thread that is bound to one core waits where another program uses that core.
            "ENABLE_CPU_PINNING": False,
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": self.precision,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        try:
            core = runtime.Core()
            if shapes is not None:
                graph = with_lengths(graph, shapes)
            model = core.read_model(io.BytesIO(graph))
            if shapes is not None:
                model.reshape({name: list(shape) for name, shape in shapes})
            return core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise ExportError(
                f"deploy: openvino {runtime.__version__} cannot run the model ({error}); expected "
                "operators that it knows. Use another engine"
            ) from error

    def placement(self, graph: bytes) -> str:
        """See :meth:`GraphEngine.placement`."""
        nodes = Counter[bool]()
        compiled = self._compile(self._for_this_cpu(graph), torch.get_num_threads(), None)
        for node in compiled.get_runtime_model().get_ops():
            info = {key: str(value.value) for key, value in node.get_rt_info().items()}
            if info.get("layerType") in _COMPUTING:
                nodes[info.get("runtimePrecision", "").lower() in ("u8", "i8")] += 1
        return f"{nodes[True]} of {nodes.total()} computing nodes run on integers"


def _refusing(run: Run, read: ReadGraph, usual: tuple[Shapes, ...]) -> Run:
    """Return ``run`` with a check of each new image size or length, whatever the batch.

    A graph with open lengths takes images that are smaller than a kernel, and returns what its
    memory held before.
    """
    runtime = import_optional("openvino", _NEEDED_BY, "openvino")
    known = {tuple(shape[1:] for _, shape in shapes) for shapes in usual}

    def checked(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        key = tuple(tuple(value.shape[1:]) for value in feeds.values())
        if key not in known:
            shapes = {name: list(value.shape) for name, value in feeds.items()}
            try:
                runtime.Core().read_model(io.BytesIO(read())).reshape(shapes)
            except RuntimeError as error:
                raise _wrong_shapes(feeds, error) from error
            known.add(key)
        return run(feeds)

    return checked


def _wrong_shapes(feeds: Mapping[str, Tensor], error: RuntimeError) -> ExportError:
    shapes = {name: tuple(value.shape) for name, value in feeds.items()}
    return ExportError(
        f"openvino: cannot run the model on inputs of shapes {shapes} ({error}); expected shapes "
        "like those of the example"
    )


def _bound(compiled: Any) -> Run:
    """Return a compiled graph as a function that several threads may call."""
    tensor_of = import_optional("openvino", _NEEDED_BY, "openvino").Tensor
    # An input also has the names of nodes that only pass it on, such as casts that change nothing.
    names = [port.get_names() for port in compiled.inputs]
    count = len(compiled.outputs)
    requests = [compiled.create_infer_request()]  # append and pop are atomic

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        try:
            request = requests.pop()
        except IndexError:  # another thread computes with the last one
            request = compiled.create_infer_request()
        try:
            for index, known in enumerate(names):
                (array,) = (value.numpy() for name, value in feeds.items() if name in known)
                request.set_input_tensor(index, tensor_of(array, shared_memory=True))
            request.infer()
            # Copies, because the next call overwrites what a request returns.
            arrays = [request.get_output_tensor(i).data.copy() for i in range(count)]
        except RuntimeError as error:
            raise _wrong_shapes(feeds, error) from error
        requests.append(request)
        return [torch.from_numpy(array) for array in arrays]

    return run


@lru_cache
def reads_signed_codes() -> bool:
    """Return True if OpenVINO's convolutions read signed codes on this CPU.

    A small convolution is compiled and asked: elsewhere OpenVINO makes its codes unsigned. So
    whatever limits the kernels (an environment variable, an operating system without AMX) is seen.
    """
    runtime = import_optional("openvino", _NEEDED_BY, "openvino")
    ops: Any = import_optional("openvino.opset13", _NEEDED_BY, "openvino")
    image = ops.parameter([1, 16, 8, 8], runtime.Type.f32)
    codes = ops.fake_quantize(image, -128.0, 127.0, -128.0, 127.0, 256)
    stored = ops.constant(torch.ones(16, 16, 1, 1, dtype=torch.int8, device="cpu").numpy())
    weight = ops.multiply(
        ops.convert(stored, runtime.Type.f32), ops.constant(0.5, runtime.Type.f32)
    )
    result = ops.convolution(codes, weight, [1, 1], [0, 0], [0, 0], [1, 1])
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = runtime.Core().compile_model(runtime.Model([result], [image]), "CPU", settings)
    nodes = (node.get_rt_info() for node in compiled.get_runtime_model().get_ops())
    return any(
        str(info["layerType"].value) == "Convolution"
        and str(info["runtimePrecision"].value).lower() == "i8"
        for info in nodes
    )
