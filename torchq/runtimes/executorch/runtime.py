"""ExecuTorch with XNNPACK: integer kernels for phones and small computers, and for CPUs here."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_arguments
from torchq.lowering.check import RESULT_TOLERANCE
from torchq.onnx.interface import argument_names
from torchq.runtime import Arithmetic, Codes, Placement, PlanPass, Writer
from torchq.runtimes.checks import ACTIVATIONS, AVG_POOLS, MAX_POOLS
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.executorch.arithmetic import XnnpackArithmetic
from torchq.runtimes.executorch.lower import (
    EXTRA,
    PteReport,
    check_installed,
    export_pte,
    lowered,
    quiet,
)
from torchq.runtimes.executorch.program import traced
from torchq.runtimes.export import class_name
from torchq.runtimes.file_engine import EngineModule, FileEngine
from torchq.runtimes.interface import (
    CallSignature,
    GraphInput,
    GraphInterface,
    ReadGraph,
    Run,
    Shapes,
    Structure,
    example_arguments,
    flatten,
)
from torchq.swap.passes import float_kernels, quantize_results
from torchq.utils import copy_module, progress_stages
from torchq.utils.optional import import_optional

_PLACEMENT = Placement(
    # Integer kernels exist between Q/DQ alone, so every tensor between layers needs a pair.
    operators=frozenset(["add", "mul", "cat", "pool", "activation"]),
    modules=(MAX_POOLS, AVG_POOLS, *ACTIVATIONS),
)
#: Layers that compute on integers where their results are quantized too, and those that never do.
_TO_CODES = frozenset(
    ["Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d", "Linear"]
)
_NEVER = frozenset(
    ["Conv3d", "ConvTranspose3d", "MultiheadAttention", "RNN", "GRU", "LSTM"]
)
#: Codes without negative values begin at 0: quantizers on both sides of a ReLU have one grid then.
_CODES = Codes(int32_biases=True)


@dataclass(frozen=True, kw_only=True, repr=False)
class ExecuTorch(FileEngine):
    """ExecuTorch, with the kernels of XNNPACK.

    Attributes:
        quantized: see :class:`torchq.runtimes.Engine`.
    """

    extra: ClassVar[str] = EXTRA
    name: str = "executorch"
    placement: Placement | None = _PLACEMENT
    # What is concatenated must have one scale, so no pass separates ranges.
    planning: tuple[PlanPass, ...] = (partial(quantize_results, linear=True),)
    judging: tuple[PlanPass, ...] = (
        partial(float_kernels, to_codes=_TO_CODES, never=_NEVER),
    )
    codes: Codes | None = _CODES
    kernels: frozenset[str] = frozenset(["rows", "clips", "moves", "transposed"])
    limits: tuple[str, ...] = (
        "A file takes inputs of the shapes that it was made with alone, batch size included.",
        "A layer whose result nothing quantizes, as a last one's, or a projection of "
        "nn.MultiheadAttention, computes in float with the values of its quantized weight.",
        "Products of attention, LayerNorm, GELU, Sigmoid and Softmax compute in float.",
        "The number of threads is that of the process, whatever torch is set to.",
    )
    versions: str = "1.5.1"
    proved: str = "per layer"
    packages: tuple[str, ...] = ("executorch",)

    @property
    def arithmetic(self) -> Arithmetic | None:
        """See :attr:`Runtime.arithmetic`: the kernels of XNNPACK."""
        return XnnpackArithmetic()

    def check(self) -> None:
        """See :meth:`torchq.runtimes.Engine.check`."""
        check_installed(self._needed_by)

    def writers(self) -> Mapping[str, Writer]:
        """See :meth:`torchq.runtimes.Runtime.writers`."""
        return {".pte": export_pte}

    def candidates(self) -> tuple[Engine, ...]:
        """Return none for "fastest": it takes half a minute to lower a model."""
        return ()

    def build(self, task: Task) -> EngineModule:
        """See :meth:`torchq.runtimes.Engine.build`."""
        self.check()
        task.require_no_state(self.label)
        with progress_stages(
            "deploy", ("lower for executorch",), enabled=task.progress
        ):
            model = copy_module(task.model if self.quantized else task.float_model)
            _, structure = flatten(task.outcome)
            tensors = _take_tensors_alone(model, task.example, structure)
            graph, report = lowered(*traced(model, tuple(tensors.values())))
            interface = _interface(task, tensors, structure)
            stored = torch.frombuffer(bytearray(graph), dtype=torch.uint8)
            module = EngineModule(self, stored, interface, report)
            for check in task.checks:
                try:
                    deviation = check.unexplained(module, RESULT_TOLERANCE)
                except RuntimeError as error:
                    raise ExportError(
                        f"deploy: target {self.label!r}: the runtime cannot run the file that it "
                        f"made ({error}). Leave parts in float with exclude=, or use "
                        "target='torch'"
                    ) from error
                if deviation:
                    raise ExportError(
                        f"deploy: target {self.label!r}: {deviation}, for {check.what}. Compare "
                        "the "
                        "layers with torchq.layer_errors, or use target='torch'"
                    )
        return module

    def open(self, read: ReadGraph, threads: int, usual: Shapes = ()) -> Run:
        """See :meth:`FileEngine.open`. One call at a time: a method has one set of buffers."""
        with quiet():
            runtime = import_optional("executorch.runtime", self._needed_by, self.extra)
            program = runtime.Runtime.get().load_program(read())
        lock = threading.Lock()

        def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
            # The program holds the bytes that its method reads, so it has to stay.
            with lock:
                return list(
                    program.load_method("forward").execute(list(feeds.values()))
                )

        return run

    def integer_share(self, module: EngineModule) -> str:
        """See :meth:`FileEngine.integer_share`; lowering has reported it."""
        report = module.report
        assert isinstance(report, PteReport)
        whole = len(report.integer)
        return f"{whole} of {whole + len(report.in_float)} layers run on integers"


def _take_tensors_alone(
    model: nn.Module, example: object, structure: Structure
) -> dict[str, Tensor]:
    """Let a model take the tensors of an example and return tensors; return the former by name.

    Other arguments are built in: the runtime has them among its inputs otherwise.
    """
    args, kwargs = call_arguments(model, example)
    forward = model.forward
    names = [*argument_names(model, len(args)), *kwargs]
    values = dict(zip(names, (*args, *kwargs.values()), strict=True))
    tensor_by_name = {
        name: value for name, value in values.items() if isinstance(value, Tensor)
    }

    def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
        new = list(
            {**values, **dict(zip(tensor_by_name, tensors, strict=True))}.values()
        )
        out = forward(
            *new[: len(args)], **dict(zip(kwargs, new[len(args) :], strict=True))
        )
        return tuple(structure.tensors_of(out))

    # One argument a tensor: a batch of two is not one with a label.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in tensor_by_name]
    vars(of_tensors)["__signature__"] = inspect.Signature(parameters)
    vars(model)["forward"] = of_tensors
    return tensor_by_name


def _interface(
    task: Task, tensors: Mapping[str, Tensor], structure: Structure
) -> GraphInterface:
    """Return what a file takes and returns: tensors of the shapes of the example alone."""
    parameters, values = example_arguments(task.model, task.example)
    inputs = tuple(
        GraphInput(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()
    )
    constants = {name: value for name, value in values.items() if name not in tensors}
    signature = CallSignature(class_name(task.model), parameters, inputs, constants)
    return GraphInterface(signature, structure, ())
