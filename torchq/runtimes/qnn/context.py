"""Files with the binary of a chip: compiled here, opened on a device, or on the emulator again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import tensors_in
from torchq.lowering.api import simulated_copy
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.qnn.passes import with_fixed_shapes
from torchq.runtimes.qnn.session import Session
from torchq.utils import network_of, progress_stages, replacing

_STAGES = ("export", "compile")


@dataclass(frozen=True)
class ContextReport:
    """What :func:`write_context` wrote; ``print`` it.

    Attributes:
        path: the file.
        chip: that the binary is for.
        shapes: of the inputs, by name: the only ones that it takes.
        bytes: of the file.
    """

    path: Path
    chip: str
    shapes: Mapping[str, tuple[int, ...]]
    bytes: int

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        return (
            f"wrote {self.path} ({self.bytes / 2**20:.2f} MiB): a binary for {self.chip}, for "
            f"{shapes}. Open it in ONNX Runtime with the QNN provider; here with "
            "torchq.runtimes.qnn.open_context"
        )


def write_context(
    runtime: Engine,
    chip: str,
    compile_graph: Callable[[bytes], bytes],
    model: nn.Module,
    example: object,
    path: str | os.PathLike[str],
    *,
    progress: bool = True,
) -> ContextReport:
    """Write a calibrated model as an ONNX file whose one node holds the binary for a chip.

    The file is replaced whole or not at all. It takes tensors of the shapes of the example alone.

    Args:
        runtime: that the file is for.
        chip: its name.
        compile_graph: returns the file with the binary of an ONNX file whose lengths are fixed.
        model: calibrated, and quantized for ``"qnn"``; left unchanged.
        example: arguments for one call, see :func:`torchq.graph.call_model`.
        path: the file.
        progress: show a bar where it takes longer than a second.

    Raises:
        ExportError: the chip does not take all of the model, or the compile took too long.
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    runtime.check()
    stages = progress_stages("export", _STAGES, enabled=progress)
    with replacing(path) as (written,), stages as next_stage:
        task = Task(simulated_copy(network_of(model)), example, compares=False)
        graph, interface = task.graph(runtime, True, task.lengths[-1])
        next_stage()
        names = [graph_input.name for graph_input in interface.signature.inputs]
        shapes = tuple(
            (name, tuple(tensor.shape))
            for name, tensor in zip(names, tensors_in(example), strict=False)
        )
        context = compile_graph(with_fixed_shapes(graph.numpy().tobytes(), shapes))
        written.write_bytes(context)
    return ContextReport(Path(path), chip, dict(shapes), len(context))


def open_context(
    path: str | os.PathLike[str], *, partly: bool = False
) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
    """Open a file of :func:`write_context` on the emulator.

    Args:
        path: the file.
        partly: operators that the chip did not take run on the CPU.

    Returns:
        A function of the inputs by name, float32 tensors of the shapes of the file, that returns
        the results in order. It may not be called in a process that was forked later.

    Raises:
        ExportError: it is no such file.
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    try:
        context = Path(path).read_bytes()
    except OSError as error:
        raise ExportError(f"open_context: {path}: {error.strerror}") from error
    try:
        return Session(context, partly=partly)
    except ExportError:
        raise
    except Exception as error:  # The exception classes of ONNX Runtime are private.
        raise ExportError(
            f"open_context: {path}: cannot be opened ({error}); expected a file that export_onnx "
            "or torchq quantize wrote with the ending .qnn"
        ) from error
