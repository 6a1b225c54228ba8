"""ONNX Runtime: integer kernels for convolutions and matrix products, on CPUs and GPUs.

Sources: what versions 1.31 and 1.32 were seen to fuse, and measurements with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torchq.errors import ConfigError, ExportError
from torchq.onnx.passes.convolutions import fit_biases, with_lengths
from torchq.runtime import Arithmetic, Codes, FileRules, Placement
from torchq.runtimes.checks import (
    ACTIVATIONS,
    AVG_POOLS,
    IN_FLOAT,
    IN_FLOAT_FOR_NORMS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
)
from torchq.runtimes.graph_engine import GraphEngine, file_of, run_by_shape
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnxruntime.arithmetic import OnnxRuntimeArithmetic
from torchq.runtimes.onnxruntime.convolutions import (
    convolve_averages,
    gather_shuffled,
    merge_groups,
)
from torchq.runtimes.onnxruntime.inspect import inspect_onnx
from torchq.runtimes.onnxruntime.matmuls import split_gemms
from torchq.runtimes.onnxruntime.pairs import (
    quantize_concatenated,
    quantize_reshaped,
    separate_clips,
    store_float_weights,
    widen_four_bit_weights,
)
from torchq.runtimes.onnxruntime.rules import check_float_outputs, check_transposed_convolutions
from torchq.runtimes.onnxruntime.session import Session
from torchq.utils.optional import import_optional

_PLACEMENT = Placement(
    # Integer kernels exist between Q/DQ alone, so every tensor between layers needs a pair.
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention", "activation"]),
    modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
    float_inputs=("type:torch.nn.modules.conv.ConvTranspose[123]d",),
    quantized_results=True,
    narrow_depthwise=16,
    most_unequal=1.5,
)
# Unsigned codes include the ReLU in front of them; signed ones would keep it, and the convolution
# in float.
_CODES = Codes(stored="unsigned", fitted=True, int32_biases=True)
_FILE = FileRules(
    passes=(
        widen_four_bit_weights,
        quantize_reshaped,
        convolve_averages,
        gather_shuffled,
        quantize_concatenated,
        split_gemms,
        separate_clips,
        store_float_weights,
        fit_biases,
        merge_groups,
    ),
    checks=(
        partial(check_unfolded_norms, IN_FLOAT, IN_FLOAT_FOR_NORMS),
        check_float_outputs,
        check_transposed_convolutions,
        check_one_range_per_tensor,
    ),
)

#: The setting ``provider`` -> the name in ONNX Runtime.
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class OnnxRuntime(GraphEngine):
    """ONNX Runtime.

    Attributes:
        quantized: see :class:`Engine`.
        provider: whose kernels it uses: ``"cpu"``, or ``"cuda"``, which needs a GPU and the package
            onnxruntime-gpu. The third one is the target "tensorrt".

    Example:
        >>> OnnxRuntime(provider="cpu").label
        'onnxruntime quantized'
    """

    unfolded_norms: ClassVar[str] = IN_FLOAT
    name: str = "onnxruntime"
    placement: Placement | None = _PLACEMENT
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "GELU, Hardswish, Hardsigmoid, LayerNorm and bilinear resizing have no integer kernel.",
        "Products of 8-bit weights and uint8 codes overflow 16 bits on x86 CPUs without VNNI or "
        "AMX. torchq's sessions set session.x64quantprecision='1' there; do so in yours, or use "
        "torchq.recipes.int8(reduce_range=True).",
    )
    versions: str = "1.31 and 1.32"
    proved: str = "equal codes"
    packages: tuple[str, ...] = ("onnxruntime", "onnx", "onnx_ir")
    session: Callable[..., Any] | None = Session
    provider: str = "cpu"

    def __post_init__(self) -> None:
        allowed = [name for name in _PROVIDERS if (name == "tensorrt") is (self.name == "tensorrt")]
        if self.provider not in allowed:
            raise ConfigError(
                f"OnnxRuntime: got provider {self.provider!r}; expected one of "
                f"{', '.join(map(repr, allowed))}"
            )

    @property
    def arithmetic(self) -> Arithmetic | None:
        """See :attr:`Runtime.arithmetic`; the kernels of the CPU alone are known."""
        return OnnxRuntimeArithmetic() if self.provider == "cpu" else None

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; providers other than the CPU are named."""
        where = f" on {self.provider}" if self.provider == "cuda" else ""
        return f"{super().label}{where}"

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        super().check()
        runtime = import_optional("onnxruntime", self._needed_by)
        provider = _PROVIDERS[self.provider]
        available = runtime.get_available_providers()
        if provider not in available:
            raise ExportError(
                f"deploy: onnxruntime {runtime.__version__} has no {provider}; expected it for "
                f"provider={self.provider!r}, but there is only {', '.join(available)}. Install "
                "onnxruntime-gpu on a machine with an NVIDIA GPU"
            )

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`GraphEngine.open`.

        Usual shapes have a graph of their own where it has fewer nodes; fixed shapes alone are no
        faster here.
        """
        graph = read()
        fixed_shapes = usual if with_lengths(graph, usual) is not graph else ()

        def open_for(shapes: Shapes | None) -> Run:
            graph = read()
            return self._session(graph if shapes is None else with_lengths(graph, shapes), threads)

        return run_by_shape(open_for, fixed_shapes, any_batch=True)

    def _session(self, graph: bytes, threads: int) -> Run:
        """Return a file as a function of its inputs; the session keeps no copy of its bytes."""
        provider = _PROVIDERS[self.provider]
        with file_of(graph) as path:
            try:
                return Session(path, optimize=True, threads=threads, provider=provider).run
            except ExportError as error:
                raise ExportError(f"deploy: {error}. Use another target") from error

    def integer_share(self, graph: bytes) -> str:
        """See :meth:`GraphEngine.integer_share`."""
        with file_of(graph) as path:
            report = inspect_onnx(path)
        return f"{len(report.integer)} of {len(report.nodes)} computing nodes run on integers"
