"""Intel OpenVINO: integer kernels on x86 and Arm CPUs.

Sources: measurements with version 2026.4.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchq.errors import ConfigError, ExportError
from torchq.lowering.kernel import saturates
from torchq.onnx.passes.convolutions import with_lengths
from torchq.runtime import Codes, FileRules, Placement, PlanPass
from torchq.runtimes.checks import (
    AVG_POOLS,
    LAYERS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
)
from torchq.runtimes.engine import Engine
from torchq.runtimes.file_engine import EngineModule, run_by_shape
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnx_engine import OnnxEngine
from torchq.runtimes.openvino.passes import (
    own_zero_points,
    separate_channel_factors,
    separate_constants,
    separate_joined_tokens,
    separate_pairs,
    separate_reductions,
    separate_scaled_terms,
    separate_small_factors,
    separate_small_terms,
    unequal_biases,
    unsigned_codes,
)
from torchq.runtimes.openvino.planning import float_results
from torchq.runtimes.openvino.transforms import check_transforms, plain_transforms
from torchq.runtimes.openvino.windows import widen_windows
from torchq.swap.layers import open_branches
from torchq.utils.optional import import_optional

_PLACEMENT = Placement(
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention"]),
    modules=(MAX_POOLS, AVG_POOLS),
)
# The kernels of CPUs without AMX multiply uint8 by int8, and take zero points. They multiply two
# activations on integers where neither has a zero point. Depthwise convolutions take scales of
# channels too.
_CODES = Codes(fitted=True, signed_factors=True, by_channel=True)
_FILE = FileRules(
    float_types=(torch.float32, torch.float16, torch.bfloat16),
    passes=(
        plain_transforms,
        widen_windows,
        unsigned_codes,
        separate_joined_tokens,
        separate_pairs,
        own_zero_points,
        separate_reductions,
        separate_channel_factors,
        separate_scaled_terms,
        separate_small_terms,
        separate_small_factors,
        separate_constants,
        unequal_biases,
    ),
    checks=(
        # OpenVINO 2026.4 keeps the convolution on integers.
        partial(
            check_unfolded_norms,
            "computed on integers, with a factor and an offset in float",
            LAYERS,
        ),
        check_one_range_per_tensor,
        check_transforms,
    ),
)

_NEEDED_BY = "deploy(target='openvino')"
#: The setting ``precision`` -> the hint of OpenVINO.
_PRECISIONS = ("f32", "bf16", "f16")
#: Layers of a compiled graph that compute; the others move data and lengths.
_COMPUTING = frozenset(
    [
        *(
            "Convolution",
            "Deconvolution",
            "FullyConnected",
            "MatMul",
            "Pooling",
            "Eltwise",
        ),
        *(
            "MVN",
            "Softmax",
            "Reduce",
            "Interpolate",
            "ScaledDotProductAttention",
            "Subgraph",
        ),
        *("RNNSeq", "LSTMSequence", "Math"),
    ]
)


@dataclass(frozen=True, kw_only=True, repr=False)
class OpenVino(OnnxEngine):
    """OpenVINO on the CPU.

    Attributes:
        quantized: see :class:`Engine`.
        precision: of what is not quantized. By itself OpenVINO computes in bfloat16 on CPUs that
            can, with errors of a few percent; here the default is ``"f32"``.

    Example:
        >>> OpenVino(quantized=False, precision="bf16").label
        'openvino float bf16'
    """

    name: str = "openvino"
    placement: Placement | None = _PLACEMENT
    # Where a convolution's result is quantized and then added, OpenVINO makes one kernel of all,
    # which cuts that result at the ends of its range but does not round it.
    adapting: tuple[PlanPass, ...] = (open_branches,)
    planning: tuple[PlanPass, ...] = (float_results,)
    # Its kernels have a factor and an offset behind them.
    float_before_norms: frozenset[str] = frozenset()
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "OpenVINO computes the float parts in bfloat16 on CPUs that have it; "
        'set INFERENCE_PRECISION_HINT="f32" to compare with float32.',
    )
    versions: str = "2026.4"
    proved: str = "per layer"
    timer: str = "benchmark_app -m {file} -hint latency"
    packages: tuple[str, ...] = ("openvino", "onnx", "onnx_ir")
    extra: ClassVar[str] = "openvino"
    precision: str = "f32"

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

    def excuse(self) -> str:
        """See :meth:`torchq.runtimes.Runtime.excuse`."""
        if not saturates():
            return ""
        return (
            "This CPU has no VNNI instructions, so that products of 8-bit weights can overflow. "
            "Quantize with torchq.recipes.int8(reduce_range=True)"
        )

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`; bfloat16 only where the CPU multiplies it."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        capabilities = runtime.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        engines: list[Engine] = []
        for precision in ("f32", "bf16") if "BF16" in capabilities else ("f32",):
            engines += [
                replace(self, quantized=q, precision=precision) for q in (True, False)
            ]
        return tuple(engines)

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`FileEngine.open`. Usual shapes have a graph of their own, which is faster."""

        def open_for(shapes: Shapes | None) -> Run:
            run = _bound(self._compile(read(), threads, shapes))
            return run if shapes is not None else _refusing(run, read, usual)

        return run_by_shape(open_for, usual)

    def _compile(self, graph: bytes, threads: int, shapes: Shapes | None) -> Any:
        """Return the compiled graph, for inputs of these shapes or with open lengths."""
        runtime = import_optional("openvino", _NEEDED_BY, "openvino")
        settings = {
            # A thread that is bound to one core waits where another program uses that core.
            "ENABLE_CPU_PINNING": False,
            # Products with weights of 4 bits would quantize their inputs once more.
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
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
                "operators that it knows. Use another target"
            ) from error

    def integer_share(self, module: EngineModule) -> str:
        """See :meth:`FileEngine.integer_share`."""
        nodes = Counter[bool]()
        compiled = self._compile(module.graph_bytes(), torch.get_num_threads(), None)
        for node in compiled.get_runtime_model().get_ops():
            properties = {
                key: str(value.value) for key, value in node.get_rt_info().items()
            }
            if properties.get("layerType") in _COMPUTING:
                nodes[
                    properties.get("runtimePrecision", "").lower() in ("u8", "i8")
                ] += 1
        return f"{nodes[True]} of {nodes.total()} computing nodes run on integers"


def _refusing(run: Run, read: ReadGraph, usual: Shapes) -> Run:
    """Return ``run`` with a check of each new image size or length, whatever the batch.

    A graph with open lengths takes images that are smaller than a kernel, and returns what its
    memory held before.
    """
    runtime = import_optional("openvino", _NEEDED_BY, "openvino")
    accepted = {tuple(shape[1:] for _, shape in usual)}

    def checked(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        key = tuple(tuple(value.shape[1:]) for value in feeds.values())
        if key not in accepted:
            shapes = {name: list(value.shape) for name, value in feeds.items()}
            try:
                runtime.Core().read_model(io.BytesIO(read())).reshape(shapes)
            except RuntimeError as error:
                raise _wrong_shapes(feeds, error) from error
            accepted.add(key)
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
            for index, port_names in enumerate(names):
                (value,) = (
                    value for name, value in feeds.items() if name in port_names
                )
                array = value.contiguous().numpy()
                request.set_input_tensor(index, tensor_of(array, shared_memory=True))
            request.infer()
            # Copies, because the next call overwrites what a request returns.
            arrays = [request.get_output_tensor(i).data.copy() for i in range(count)]
        except RuntimeError as error:
            raise _wrong_shapes(feeds, error) from error
        requests.append(request)
        return [torch.from_numpy(array) for array in arrays]

    return run
