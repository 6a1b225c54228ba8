"""Engines that read an ONNX file: the export, and the check of what they compute."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from torchq.errors import ExportError, InputError, MissingExtraError
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.lowering.check import (
    EQUAL_RESULTS,
    RESULT_TOLERANCE,
    ReferenceCheck,
    distance,
    norm,
)
from torchq.onnx.torch_exporters import TorchExportError
from torchq.onnx.verify.verify import verify_layers
from torchq.runtime import open_session
from torchq.runtimes.engine import Task
from torchq.runtimes.export import WARNS, OpenLengths, tensor_shapes
from torchq.runtimes.file_engine import EngineModule, FileEngine
from torchq.runtimes.interface import Run, flatten
from torchq.utils import progress_stages
from torchq.workflow.modes import has_wide_weights


@contextmanager
def file_of(graph: bytes) -> Iterator[Path]:
    """Yield a file with these bytes, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(graph)
        yield path


def runs_as_written(
    module: EngineModule, example: object, most: float = EQUAL_RESULTS
) -> bool:
    """Return True if an engine returns what its file does, run node by node.

    A deep network may amplify one value that is rounded the other way at a tie. So results may
    differ by twice as much as those of the file do where its inputs change a little. A relative
    error of ``most`` is always allowed.
    """
    args, kwargs = call_arguments(module, example)
    feeds = module.interface.signature.bind(args, kwargs, torch.device("cpu"))
    with file_of(module.graph_bytes()) as path:
        run = open_session(path, optimize=False).run
    with torch.no_grad():
        rebuilt = module.interface.structure.rebuild
        returned, expected, moved = (
            list(tensors_in(results))
            for results in (
                call_model(module, example),
                rebuilt(run(feeds)),
                rebuilt(run({name: _changed(value) for name, value in feeds.items()})),
            )
        )
    return all(
        distance(got, want) <= max(most * norm(want), 2 * distance(other, want))
        for got, want, other in zip(returned, expected, moved, strict=True)
    )


def _changed(x: Tensor) -> Tensor:
    """Return floating-point numbers with a noise of a thousandth; others as they are."""
    if not x.is_floating_point():
        return x
    noise = torch.randn(
        x.shape, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    return (x * (1 + max(1e-3, torch.finfo(x.dtype).eps) * noise)).to(x.dtype)


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class OnnxEngine(FileEngine):
    """A runtime that runs the file which :func:`torchq.export_onnx` writes for it."""

    def opened(self, path: Path) -> Run | None:
        """See :meth:`torchq.runtimes.Runtime.opened`."""
        try:
            self.check()
        except (ExportError, MissingExtraError):
            return None
        graph = path.read_bytes()
        return self.open(lambda: graph, torch.get_num_threads(), ())

    def build(self, task: Task) -> EngineModule:
        """See :meth:`Engine.build`. The default exporter is tried first.

        The older one follows where that one fails and tracing warns of nothing. A graph may have
        taken a length for a constant. So its results are compared for other lengths too, and it is
        exported with fewer open ones where they differ.
        """
        self.check()
        _require_float32(task.model)
        task.require_no_state(self.label)
        problems: list[ExportError] = []
        usual = tensor_shapes(task.model, task.example)
        stages = (f"export for {self.label}",)
        with progress_stages("deploy", stages, enabled=task.progress):
            hopeless: set[bool] = set()
            for dynamo, lengths in _attempts(task.model, task.lengths):
                if dynamo in hopeless:
                    continue
                try:
                    runtime = self if self.quantized else None
                    graph, interface = task.graph(runtime, dynamo, lengths)
                    module = EngineModule(self, graph, replace(interface, usual=usual))
                    self._compare(module, task, lengths)
                    return module
                except ExportError as error:
                    log.debug(
                        "%s, dynamo=%s, %s: %s", self.label, dynamo, lengths, error
                    )
                    problems.append(error)
                    if _depends_on_data(error):
                        hopeless.add(dynamo)
        raise _first_of(problems, self.label)

    def _compare(self, module: EngineModule, task: Task, lengths: OpenLengths) -> None:
        """Raise an error where a graph computes something else than its model."""
        notes = [
            self._compare_on(module, task, check)
            for check in (task.checks if self.quantized else task.float_checks)
        ]
        if task.compares:
            self.compare_lengths(module, task, lengths)
        for note in notes:
            if note:
                warnings.warn(note, stacklevel=5)

    def _compare_on(
        self, module: EngineModule, task: Task, check: ReferenceCheck
    ) -> str:
        """Raise an error if results differ, unless every layer agrees; return what is suspicious.

        Results that are as near as float32 and few codes explain need no closer look.
        """
        deviation = check.difference(module)
        if not deviation:
            return ""
        deviates = f"deploy: target {self.label!r}: {deviation}, for {check.what}"
        excuse = self.excuse() if has_wide_weights(task.model) else ""
        advice = f"{excuse}; check=False allows it" if excuse else "Use another target"
        if not self.quantized:
            raise ExportError(f"{deviates}. {advice}")
        agrees, shows_session = _file_agrees(module, task, check.example)
        if not agrees:
            raise ExportError(f"{deviates}. {advice}")
        # Where the layers are those of the session, the module need only be this session.
        most = RESULT_TOLERANCE if shows_session else EQUAL_RESULTS
        is_written = runs_as_written(module, check.example, most)
        # Numbers that index a table cannot be moved a little, so ties are moved as well.
        if not is_written and check.unexplained(module, most):
            raise ExportError(
                f"{deviates}, while the file agrees where it is run node by node: the engine "
                "computes "
                f"something else than its file says. {advice}"
            )
        far = check.difference(module, RESULT_TOLERANCE)
        if not far:
            return ""
        return (
            f"deploy: target {self.label!r}: {far}, though every layer of the file agrees when "
            "given the same input: the model amplifies values that are rounded the other way at a "
            "tie. Its quantized results depend on the machine that computes them"
        )

    def compare_lengths(
        self, module: EngineModule, task: Task, lengths: OpenLengths
    ) -> None:
        """Raise ExportError where results for other lengths than those of the example differ.

        A graph that is opened for these may be large, and is opened again once a call needs it.
        """
        module = EngineModule(module.settings, module.graph, module.interface)
        for check in task.checks_of_other_lengths(lengths, quantized=self.quantized):
            if flatten(check.outcome)[1] != module.interface.structure:
                raise ExportError(
                    f"deploy: target {self.label!r}: for an example of another shape the model "
                    "returns other numbers or another number of tensors beside its tensors; "
                    "expected the same, as a graph holds those of the example"
                )
            try:
                problem = check.difference(module)
            except InputError as error:
                # torch fixes a length that the forward turns into a number, and says nothing.
                raise ExportError(
                    f"deploy: target {self.label!r}: the graph takes no example of another shape "
                    f"({error})"
                ) from error
            agrees = (
                self.quantized
                and problem
                and _file_agrees(module, task, check.example)[0]
            )
            if problem and not agrees:
                raise ExportError(
                    f"deploy: target {self.label!r}: for an example of another shape {problem}"
                )


def _depends_on_data(error: ExportError) -> bool:
    """Return True if no other open lengths mend what an exporter says of a forward."""
    return "data-dependent" in str(error) or WARNS in str(error)


def _first_of(problems: list[ExportError], label: str) -> ExportError:
    """Return the first problem, of which the advice is that of ``deploy``.

    A file that was compared says more than one that could not be made with all lengths open.
    """
    compared = [p for p in problems if str(p).startswith(f"deploy: target {label!r}")]
    hides_another = compared and not _depends_on_data(problems[0])
    first = compared[0] if hides_another else problems[0]
    if not isinstance(first, TorchExportError):
        return first
    reason = str(first).partition(". dynamo=")[0].removeprefix("export_onnx: ")
    return ExportError(
        f"deploy: target {label!r}: {reason}; expected a forward that one graph holds for all "
        "inputs. Use target='torch', which leaves such parts to Python"
    )


def _attempts(
    model: nn.Module, lengths: tuple[OpenLengths, ...]
) -> Iterator[tuple[bool, OpenLengths]]:
    """Yield what to try in order: which exporter, and which lengths are open."""
    exporters = (True, False)
    # The default exporter follows each step of these, for minutes, and fixes how many there are.
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    for dynamo in exporters:
        for opened in lengths[:-1]:
            if not (dynamo and is_recurrent and opened.others):
                yield dynamo, opened
    for dynamo in exporters:
        yield dynamo, lengths[-1]


def _file_agrees(
    module: EngineModule, task: Task, example: object
) -> tuple[bool, bool]:
    """Return whether every layer of the file computes what the simulation does for an example.

    And whether these are the layers as the engine has optimised them. Codes may be off by one: a
    model that was quantized for no target adds float biases, where the engine adds integers.
    """
    with file_of(module.graph_bytes()) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            report = verify_layers(task.model, path, example)
        except (ExportError, MissingExtraError) as error:
            log.debug("the file could not be verified: %s", error)
            return False, False
    by_one = [
        x for x in report.layers if x.allowed and not x.parameters and x.max_diff <= 1
    ]
    agrees = bool(report.layers) and all(x.ok or x in by_one for x in report.layers)
    return agrees, report.shows_session


def _require_float32(model: nn.Module) -> None:
    """Raise an error if a model computes in another dtype than float32."""
    dtype = next(
        (t.dtype for t in model.parameters() if t.is_floating_point()), torch.float32
    )
    if dtype is not torch.float32:
        raise ExportError(
            f"deploy: got a model in {dtype}; expected float32, which other engines run. Call "
            "model.float() before calibrating, or use target='torch'"
        )
