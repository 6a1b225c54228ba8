"""From a program in the form of PT2E to a ``.pte`` file whose integer layers XNNPACK computes.

Rule 9 of ``form.py``: without ``executorch.kernels.quantized`` there are no kernels for Q and DQ
that stay outside. Rule 10: nothing raises when an operator stays outside, so all are counted here.
"""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from torchq.errors import ExportError
from torchq.lowering.api import simulated_copy
from torchq.runtimes.executorch.form import kind_of, path_of
from torchq.runtimes.executorch.program import traced
from torchq.utils import bullets, progress_stages, replacing
from torchq.utils.optional import import_optional

#: The extra that installs the package, and the oldest release that the rules were tried with.
EXTRA = "executorch"
_OLDEST = (1, 5)
_PARTITIONER = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
#: What the progress bar shows.
_STAGES = ("trace", "lower", "write")


@dataclass(frozen=True)
class PteReport:
    """What :func:`export_pte` wrote; ``print`` it.

    Attributes:
        path: the file.
        size: its bytes.
        delegates: the number of parts that XNNPACK computes.
        integer: paths of the layers that compute on integers.
        in_float: path of a layer with a quantized weight that computes in float -> why.
        outside: operators that slow kernels of ExecuTorch compute, as "name (path of the module)",
            each with its number of calls.
        shapes: the inputs with the one shape that each may have.
    """

    path: Path | None
    size: int
    delegates: int
    integer: tuple[str, ...]
    in_float: Mapping[str, str]
    outside: Mapping[str, int]
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        where = "the program" if self.path is None else str(self.path)
        sizes = ", ".join(str(shape) for shape in self.shapes)
        lines = [
            f"{where}: {self.size / 2**20:.2f} MiB for inputs of the shape {sizes}; "
            f"{len(self.integer)} layers on integers, in {self.delegates} parts for XNNPACK"
        ]
        if self.in_float:
            rows = [f"{path}: {why}" for path, why in self.in_float.items()]
            lines.append(f"in float, with quantized weights:\n{bullets(rows)}")
        if self.outside:
            rows = [f"{count} x {name}" for name, count in self.outside.items()]
            lines.append(f"outside of XNNPACK, on portable kernels:\n{bullets(rows)}")
        return "\n".join(lines)


def export_pte(
    model: nn.Module,
    example: object,
    path: str | os.PathLike[str],
    *,
    progress: bool = True,
) -> PteReport:
    """Write a calibrated model as a ``.pte`` file for ExecuTorch, with XNNPACK's kernels.

    The file is replaced whole or not at all. It takes tensors of the shapes of the example alone,
    batch size included.

    Args:
        model: calibrated, and best quantized with ``target="executorch"``; left unchanged.
        example: arguments for one call, see :func:`torchq.graph.call_model`.
        path: the file.
        progress: show a bar where it takes longer than a second: it takes half a minute.

    Returns:
        What computes where; ``print`` it.

    Raises:
        ExportError: See :func:`to_exported_program`; or a convolution with a quantized weight is
            left outside of XNNPACK, which would compute something else.
        MissingExtraError: ExecuTorch is not installed.

    Example:
        >>> torchq.runtimes.executorch.export_pte(model, x, "model.pte")  # doctest: +SKIP
    """
    check_installed("export_pte")
    stages = progress_stages("export", _STAGES, enabled=progress)
    with replacing(path) as (written,), stages as next_stage:
        program, layers = traced(simulated_copy(model), example)
        next_stage()
        graph, report = lowered(program, layers)
        next_stage()
        written.write_bytes(graph)
    return PteReport(**{**vars(report), "path": Path(path)})


def check_installed(needed_by: str) -> None:
    """Raise an error where ExecuTorch is missing, or too old."""
    import_optional("executorch", needed_by, EXTRA)  # this alone is fast
    version = metadata.version("executorch")
    parts = tuple(int(p) for p in version.split(".")[:2] if p.isdigit())
    if parts < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise ExportError(
            f"{needed_by}: got executorch {version}; expected {oldest} or later, whose partitioner "
            f"the rules were tried with. Run pip install -U torchq[{EXTRA}]"
        )


def lowered(
    program: ExportedProgram, layers: Mapping[str, str]
) -> tuple[bytes, PteReport]:
    """Return the bytes of a file, and what computes where.

    ``layers`` are those with quantized weights, with the reason why they compute in float.
    """
    with quiet():
        exir = import_optional("executorch.exir", "executorch", EXTRA)
        partitioner = import_optional(_PARTITIONER, "executorch", EXTRA)
        import_optional("executorch.kernels.quantized", "executorch", EXTRA)  # rule 9
    shapes = tuple(_user_shapes(program))
    try:
        with quiet():
            program = _with_constants_computed(program)
            manager = exir.to_edge_transform_and_lower(
                program,
                partitioner=[partitioner.XnnpackPartitioner()],
                compile_config=exir.EdgeCompileConfig(_check_ir_validity=False),
            )
            graph = manager.exported_program().graph
            outside = _outside(graph)
            data = bytes(manager.to_executorch().buffer)
    except ExportError:
        raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"executorch cannot lower the model ({type(error).__name__}: {line}); expected "
            "operators that it knows. Leave the part that it refuses in float with exclude="
        ) from error
    delegates = sum(_is_delegate(node) for node in graph.nodes)
    integer = tuple(path for path, why in layers.items() if not why)
    in_float = {path: why for path, why in layers.items() if why}
    return data, PteReport(
        None, len(data), delegates, integer, in_float, outside, shapes
    )


def _with_constants_computed(program: ExportedProgram) -> ExportedProgram:
    """Return a program that stores what operators compute of stored tensors alone.

    Attention takes slices of one weight, and a linear layer is delegated with a stored one alone.
    Weights stay codes.
    """
    passes = import_optional(
        "executorch.exir.passes.constant_prop_pass", "executorch", EXTRA
    )
    library = torch.ops.quantized_decomposed
    skipped = {
        library.dequantize_per_tensor.default,
        library.dequantize_per_channel.default,
    }
    # The pass stores tensors alone: a number is an argument of those that read it.
    known = passes.get_propagated_const_tensor_dict(program, skipped)
    numbers = {n: v for n, v in known.items() if not isinstance(v, torch.Tensor)}
    for node, number in numbers.items():
        if isinstance(number, (bool, int, float)):
            node.replace_all_uses_with(number)
            program.graph.erase_node(node)
    computed: ExportedProgram = passes.constant_prop_pass(
        program, custom_skip_targets=skipped
    )
    return computed


def _is_delegate(node: fx.Node) -> bool:
    return "call_delegate" in str(node.target)


def _outside(graph: fx.Graph) -> dict[str, int]:
    """Return the operators that XNNPACK does not compute; refuse layers with quantized weights."""
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        kind = kind_of(node)
        if not kind or _is_delegate(node):
            continue
        where = path_of(node)
        name = f"{kind} ({where})" if where else kind
        if any(
            kind_of(x).startswith("dequantize_per_") for x in node.all_input_nodes[1:]
        ):
            raise ExportError(
                f"{where or node.name}: XNNPACK leaves this quantized {kind} outside, where other "
                "kernels compute wrong numbers; expected it inside. Leave the layer in float with "
                "exclude="
            )
        counts[name] += 1
    return dict(counts)


def _user_shapes(program: ExportedProgram) -> Iterator[tuple[int, ...]]:
    names = set(program.graph_signature.user_inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            value = node.meta["val"]
            if isinstance(value, Tensor):
                yield tuple(map(int, value.shape))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep warnings and the log of ExecuTorch from the user: what they say is counted."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
