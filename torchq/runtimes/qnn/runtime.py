"""Qualcomm QNN (the HTP backend), through ONNX Runtime's QNN execution provider.

The package onnxruntime-qnn has an emulator of the chip for CPUs, which runs here. It is run and
compared with; nothing is known, or looked for, of how it computes. Files are checked against the
provider's rules too; none was run on a device.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from torch import Tensor, nn

from torchq.config import QuantConfig
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, ExportError
from torchq.graph import tensors_in
from torchq.lowering.check import (
    EQUAL_RESULTS,
    ReferenceCheck,
    call_once,
    distance,
    norm,
)
from torchq.onnx.ir import Node
from torchq.onnx.passes.convolutions import fit_biases
from torchq.runtime import Codes, FileRules, LayerBound, Placement, PlanPass, Writer
from torchq.runtimes.checks import (
    ACTIVATIONS,
    AVG_POOLS,
    LAYERS,
    MAX_POOLS,
    check_one_range_per_tensor,
    check_unfolded_norms,
)
from torchq.runtimes.chips import layers
from torchq.runtimes.engine import Task
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.interface import ReadGraph, Run, Shapes
from torchq.runtimes.onnx_engine import OnnxEngine, file_of
from torchq.runtimes.onnxruntime import inspect_onnx
from torchq.runtimes.qnn.bounds import bound_of
from torchq.runtimes.qnn.context import ContextReport, write_context
from torchq.runtimes.qnn.convolutions import (
    average_by_convolutions,
    scale_by_convolutions,
    widen_kernels,
)
from torchq.runtimes.qnn.passes import (
    flatten_biases,
    quantize_before_activations,
    quantize_before_moves,
    separate_layers,
    with_fixed_shapes,
)
from torchq.runtimes.qnn.rules import (
    check_activation_types,
    check_float_outputs,
    check_weights,
    check_wrong_kernels,
)
from torchq.runtimes.qnn.session import Session, compiled
from torchq.runtimes.qnn.widths import give_operators_one_width, give_tensors_one_width
from torchq.swap.layers import one_weight_scale, one_weight_scale_of_calls
from torchq.swap.passes import quantize_results
from torchq.utils.optional import import_optional

#: The number by which the provider knows a chip -> its name and the version of its integer unit.
CHIPS = {
    "30": ("SM8350", "v68"),
    "36": ("SM8450", "v69"),
    "43": ("SM8550", "v73"),
    "57": ("SM8650", "v75"),
    "69": ("SM8750", "v79"),
    "87": ("SM8850", "v81, not tried"),
}
#: The least versions that onnxruntime-qnn is built for.
_PYTHON = (3, 11)
_GLIBC = (2, 35)
#: Integer units whose codes are off twice as often.
_OLD = ("v68", "v69")
#: Classes of layers whose weight has one scale: the chip wants it where a result stays float.
_ONE_SCALE = ("torch.nn.modules.activation.MultiheadAttention",)
_PLACEMENT = Placement(
    operators=frozenset(
        ["add", "mul", "maximum", "cat", "pool", "matmul", "attention", "activation"]
    ),
    modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
)
_CODES = Codes(stored="unsigned", widths=(8, 16), fitted=True)
_FILE = FileRules(
    passes=(
        quantize_before_moves,
        average_by_convolutions,
        scale_by_convolutions,
        widen_kernels,
        fit_biases,
        quantize_before_activations,
        flatten_biases,
        give_operators_one_width,
        separate_layers,
    ),
    checks=(
        partial(
            check_unfolded_norms,
            "two layers for QNN, which wants the result between quantized",
            LAYERS,
        ),
        check_activation_types,
        check_weights,
        check_float_outputs,
        check_wrong_kernels,
        check_one_range_per_tensor,
    ),
)


def zero_point_recipe() -> QuantConfig:
    """Return what the provider reads: activations with zero points, symmetric weights."""
    return layers(
        "qnn", QuantDescriptor(unsigned=True, symmetric=False), QuantDescriptor()
    )


#: Two draws of one noise are sqrt(2) apart; the rest is for what one input shows of it.
_AMPLIFIED = 2.0


def _problem_of_machine() -> str:
    """Return what onnxruntime-qnn is not built for here; empty where nothing is."""
    if sys.version_info[:2] < _PYTHON:
        return f"Python {platform.python_version()}"
    if platform.system() != "Linux":
        return ""  # pip finds a package, or says that there is none
    library, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if library != "glibc" or numbers < _GLIBC:
        return f"the C library {library or 'musl or another'} {version}".rstrip()
    return ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Qnn(OnnxEngine):
    """The integer unit (HTP) of a Snapdragon, emulated on the CPU by the package onnxruntime-qnn.

    It shows whether a file compiles, and what it answers; not how fast a phone is.

    Attributes:
        soc: the chip, by the provider's number or by name: a key of :data:`CHIPS`, or the first of
            a value, such as ``"SM8550"``.
        partly: Operators that the chip does not take run on the CPU. False makes them an error
            that lists them.
        limit: seconds that a compile may take.

    Example:
        >>> Qnn(soc="SM8650").soc
        '57'
    """

    name: str = "qnn"
    recipe: Callable[[], QuantConfig] = zero_point_recipe
    placement: Placement | None = _PLACEMENT
    adapting: tuple[PlanPass, ...] = (
        partial(one_weight_scale, _ONE_SCALE),
        partial(one_weight_scale_of_calls, ("linear",)),
    )
    planning: tuple[PlanPass, ...] = (
        give_tensors_one_width,
        partial(quantize_results, linear=True, returned=True),
    )
    computes_floats: bool = False
    codes: Codes | None = _CODES
    file: FileRules | None = _FILE
    limits: tuple[str, ...] = ("Biases stay float; the provider rounds them to int32.",)
    versions: str = "onnxruntime-qnn 2.7"
    proved: str = "per layer, emulated"
    timer: str = "onnxruntime_perf_test -e qnn -i backend_path|libQnnHtp.so {file}"
    packages: tuple[str, ...] = ("onnxruntime", "onnxruntime_qnn", "onnx", "onnx_ir")
    extra: ClassVar[str] = "qnn"
    #: An emulator's time says nothing.
    measured: ClassVar[bool] = False
    soc: str = "43"
    partly: bool = False
    limit: float = 300.0

    def __post_init__(self) -> None:
        numbers = {name: number for number, (name, _) in CHIPS.items()}
        number = numbers.get(str(self.soc), str(self.soc))
        if number not in CHIPS:
            known = ", ".join(
                f"{name!r} ({number})" for name, number in numbers.items()
            )
            raise ConfigError(f"Qnn: got soc {self.soc!r}; expected one of {known}")
        if not self.limit > 0:
            raise ConfigError(f"Qnn: got limit={self.limit}; expected seconds above 0")
        object.__setattr__(self, "soc", number)

    def writers(self) -> Mapping[str, Writer]:
        """See :meth:`torchq.runtimes.Runtime.writers`."""
        return {".qnn": self.write_context}

    def write_context(
        self,
        model: nn.Module,
        example: object,
        path: str | os.PathLike[str],
        *,
        progress: bool = True,
    ) -> ContextReport:
        """Write a calibrated model as an ONNX file whose one node holds the binary for the chip.

        The file is replaced whole or not at all. It takes tensors of the shapes of the example
        alone.

        Args:
            model: calibrated, and quantized for ``"qnn"``; left unchanged.
            example: arguments for one call, see :func:`torchq.graph.call_model`.
            path: the file, whose name ends in ``.qnn``.
            progress: show a bar where it takes longer than a second.

        Raises:
            ExportError: the chip does not take all of the model, or the compile took too long.
            MissingExtraError: onnxruntime-qnn is not installed.
        """
        chip = CHIPS[self.soc][0]
        files = self, chip, self._compiled
        return write_context(*files, model, example, path, progress=progress)

    def check(self) -> None:
        """See :meth:`Engine.check`."""
        problem = _problem_of_machine()
        if problem:
            raise ExportError(
                f"{self._needed_by}: got {problem}; expected Python 3.11 or newer, on Linux with "
                "glibc 2.35 or newer, which onnxruntime-qnn is built for. Use such an environment, "
                "or export the file alone"
            )
        super().check()
        runtime = import_optional("onnxruntime", self._needed_by, self.extra)
        if not hasattr(runtime, "get_ep_devices"):
            raise ExportError(
                f"deploy: onnxruntime {runtime.__version__} takes no providers from other "
                "packages; expected 1.24 or newer. Run pip install -U torchq[qnn]"
            )

    def opened(self, path: Path) -> Run | None:
        """See :meth:`torchq.runtimes.Runtime.opened`: None, as inner results change the others."""
        return None

    @property
    def emulates(self) -> str:
        """See :attr:`torchq.runtimes.Runtime.emulates`."""
        return f"{CHIPS[self.soc][0]} (emulated)"

    def emulated(self, path: Path) -> Run:
        """See :meth:`torchq.runtimes.Runtime.emulated`."""
        self.check()
        graph = path.read_bytes()
        return self.open(lambda: graph, 1)

    def bound(self, quantize: Node) -> LayerBound:
        """See :meth:`torchq.runtimes.Runtime.bound`, and :data:`torchq.runtimes.qnn.BOUNDS`."""
        return bound_of(quantize, is_old=CHIPS[self.soc][1] in _OLD)

    def _compare_on(
        self, module: EngineModule, task: Task, check: ReferenceCheck
    ) -> str:
        """Raise an error where the chip is farther from the simulation than quantization is.

        It rounds some codes of each layer otherwise, by one, and a deep network amplifies that: its
        results are about as near to those of the simulation as to those of the float model.
        """
        float_results = tensors_in(call_once(task.float_model, check.example))
        pairs = zip(tensors_in(check.outcome), float_results, strict=True)
        noise = max(
            (distance(a, b) / norm(a) for a, b in pairs if norm(a)), default=0.0
        )
        deviation = check.difference(module, max(EQUAL_RESULTS, _AMPLIFIED * noise))
        if deviation:
            raise ExportError(
                f"deploy: target {self.label!r}: {deviation}, for {check.what}, where quantization "
                f"itself makes {noise:.2g}. Compare the layers with torchq.layer_errors, or use "
                "another target"
            )
        return ""

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`FileEngine.open`. Each shape of the inputs has a binary of its own."""
        opened: dict[Shapes, Session] = {}
        lock = threading.Lock()

        def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
            shapes = tuple((name, tuple(value.shape)) for name, value in feeds.items())
            with lock:
                if shapes not in opened:
                    opened[shapes] = self._session(with_fixed_shapes(read(), shapes))
            return opened[shapes](feeds)

        return run

    def _session(self, graph: bytes) -> Session:
        return Session(self._compiled(graph), partly=self.partly)

    def _compiled(self, graph: bytes) -> bytes:
        """Return a file with the binary for the chip."""
        return compiled(
            graph,
            self.soc,
            partly=self.partly,
            limit=self.limit,
            where=f"{self._needed_by}, {CHIPS[self.soc][0]}",
        )

    def integer_share(self, module: EngineModule) -> str:
        """See :meth:`FileEngine.integer_share`; it is that of the file."""
        with file_of(module.graph_bytes()) as path:
            report = inspect_onnx(path)
        return f"{len(report.integer)} of {len(report.nodes)} computing nodes run on integers"
