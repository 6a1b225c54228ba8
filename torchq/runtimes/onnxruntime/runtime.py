"""ONNX Runtime: integer kernels for convolutions and matrix products, on CPUs and GPUs.

Sources: what versions 1.31 and 1.32 were seen to fuse, and measurements with them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torchq.errors import ConfigError
from torchq.onnx.ir import load_model
from torchq.onnx.passes.convolutions import fit_biases
from torchq.runtime import Arithmetic, Codes, FileRules, Placement, PlanPass
from torchq.runtimes.checks import (
    ACTIVATIONS,
    AVG_POOLS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
    layers_in_front_of_norms,
    norms_text,
)
from torchq.runtimes.engine import Task
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.onnx_engine import file_of
from torchq.runtimes.onnxruntime.arithmetic import OnnxRuntimeArithmetic
from torchq.runtimes.onnxruntime.convolutions import (
    convolve_averages,
    gather_shuffled,
    merge_groups,
    pool_means,
)
from torchq.runtimes.onnxruntime.engine import SessionEngine
from torchq.runtimes.onnxruntime.matmuls import quantize_moved_rows, split_gemms
from torchq.runtimes.onnxruntime.pairs import (
    quantize_concatenated,
    quantize_padded,
    quantize_reshaped,
    quantize_unbatched,
    read_shapes_of_codes,
    separate_clips,
    separate_float_convolutions,
    separate_outputs,
    separate_softmaxes,
    store_float_weights,
    widen_four_bit_weights,
)
from torchq.runtimes.onnxruntime.planning import (
    narrow_depthwise_in_float,
    separate_ranges,
    transposed_convolutions_in_float,
)
from torchq.runtimes.onnxruntime.rules import (
    IN_FLOAT,
    IN_FLOAT_FOR_NORMS,
    check_float_outputs,
    check_transposed_convolutions,
)
from torchq.runtimes.onnxruntime.session import Session
from torchq.swap.passes import float_kernels, quantize_results

_PLACEMENT = Placement(
    # Integer kernels exist between Q/DQ alone, so every tensor between layers needs a pair.
    operators=frozenset(
        ["add", "mul", "cat", "pool", "matmul", "attention", "activation"]
    ),
    modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
)
# Unsigned codes include the ReLU in front of them; signed ones would keep it, and the convolution
# in float.
_CODES = Codes(stored="unsigned", fitted=True, int32_biases=True)
_FILE = FileRules(
    passes=(
        widen_four_bit_weights,
        read_shapes_of_codes,
        pool_means,
        quantize_unbatched,
        quantize_reshaped,
        convolve_averages,
        gather_shuffled,
        quantize_concatenated,
        quantize_padded,
        quantize_moved_rows,
        split_gemms,
        separate_clips,
        separate_softmaxes,
        separate_outputs,
        store_float_weights,
        separate_float_convolutions,
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
}


@dataclass(frozen=True, kw_only=True, repr=False)
class OnnxRuntime(SessionEngine):
    """ONNX Runtime.

    Attributes:
        quantized: see :class:`Engine`.
        provider: whose kernels it uses: ``"cpu"``, or ``"cuda"``, which needs a GPU and the package
            onnxruntime-gpu.

    Example:
        >>> OnnxRuntime(provider="cpu").label
        'onnxruntime quantized'
    """

    name: str = "onnxruntime"
    placement: Placement | None = _PLACEMENT
    adapting: tuple[PlanPass, ...] = (
        narrow_depthwise_in_float,
        transposed_convolutions_in_float,
    )
    planning: tuple[PlanPass, ...] = (separate_ranges, quantize_results)
    # Linear layers give float results on integers too.
    judging: tuple[PlanPass, ...] = (
        partial(float_kernels, to_codes=frozenset(["Conv1d", "Conv2d", "Conv3d"])),
    )
    float_before_norms: frozenset[str] = frozenset(IN_FLOAT_FOR_NORMS)
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = (
        "GELU, Hardswish, Hardsigmoid, LayerNorm and bilinear resizing have no integer kernel.",
        "Products of 8-bit weights and uint8 codes overflow 16 bits on x86 CPUs without VNNI or "
        "AMX. torchq's sessions set session.x64quantprecision='1' there; do so in yours, or use "
        "torchq.recipes.int8(reduce_range=True). Where layers run several times, or have equal "
        "codes, ONNX Runtime refuses that setting; torchq's sessions copy these weights first, and "
        "sessions of your own need reduce_range=True.",
    )
    versions: str = "1.31 and 1.32"
    proved: str = "equal codes"
    timer: str = "onnxruntime_perf_test -I {file}"
    session: Callable[..., object] | None = Session
    provider: str = "cpu"

    def __post_init__(self) -> None:
        if self.provider not in _PROVIDERS:
            raise ConfigError(
                f"OnnxRuntime: got provider {self.provider!r}; expected one of "
                f"{', '.join(map(repr, _PROVIDERS))}"
            )

    @property
    def execution_provider(self) -> str:
        """See :attr:`SessionEngine.execution_provider`."""
        return _PROVIDERS[self.provider]

    @property
    def arithmetic(self) -> Arithmetic | None:
        """See :attr:`Runtime.arithmetic`; the kernels of the CPU alone are known."""
        return OnnxRuntimeArithmetic() if self.provider == "cpu" else None

    @property
    def label(self) -> str:
        """See :attr:`Engine.label`; providers other than the CPU are named."""
        where = f" on {self.provider}" if self.provider == "cuda" else ""
        return f"{super().label}{where}"

    def build(self, task: Task) -> EngineModule:
        """See :meth:`Engine.build`; it warns of BatchNorms that cost time here."""
        module = super().build(task)
        if self.quantized:
            with file_of(module.graph_bytes()) as path:
                graph = load_model(path, check=False)
            layers = layers_in_front_of_norms(graph, IN_FLOAT_FOR_NORMS)
            if layers:
                warnings.warn(
                    f"deploy: target {self.label!r}: {norms_text(layers, IN_FLOAT)}",
                    stacklevel=3,
                )
        return module
