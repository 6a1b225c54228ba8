"""Engines that read an ONNX file: the export, the check of what they compute, and the module."""

from __future__ import annotations

import logging
import tempfile
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.errors import ExportError, MissingExtraError
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.lowering.check import (
    EQUAL_RESULTS,
    RESULT_TOLERANCE,
    ReferenceCheck,
    distance,
    norm,
)
from torchq.onnx.ir import load_model
from torchq.onnx.torch_exporters import TorchExportError
from torchq.onnx.verify.verify import verify_layers
from torchq.runtime import open_session
from torchq.runtimes.checks import IN_FLOAT_FOR_NORMS, layers_in_front_of_norms, norms_text
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.export import WARNS, OpenLengths, tensor_shapes
from torchq.runtimes.interface import GraphInterface, ReadGraph, Run, Shapes, flatten
from torchq.utils import progress_stages


@contextmanager
def file_of(graph: bytes) -> Iterator[Path]:
    """Yield a file with these bytes, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        path.write_bytes(graph)
        yield path


def runs_as_written(module: EngineModule, example: Any, most: float = EQUAL_RESULTS) -> bool:
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
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    return (x * (1 + max(1e-3, torch.finfo(x.dtype).eps) * noise)).to(x.dtype)


log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, repr=False)
class GraphEngine(Engine):
    """A runtime that runs the file which :func:`torchq.export_onnx` writes for it."""

    #: What becomes of layers with a BatchNorm behind them, where that costs time; else empty.
    unfolded_norms: ClassVar[str] = ""

    @property
    def device(self) -> torch.device:
        """Return where the tensors of a call have to be."""
        return torch.device("cpu")

    @abstractmethod
    def open(self, read: ReadGraph, threads: int, usual: Shapes) -> Run:
        """Return an ONNX file as a function of its inputs.

        Args:
            read: returns the file. The module holds it already, so a function that needs it later
                had better keep ``read`` than a copy.
            threads: the number of threads that compute one call.
            usual: the shapes of the example; others are possible too.

        Raises:
            ExportError: the engine cannot run the file.
        """

    def opened(self, path: Path) -> Run | None:
        """See :meth:`torchq.runtimes.Runtime.opened`."""
        try:
            self.check()
        except (ExportError, MissingExtraError):
            return None
        graph = path.read_bytes()
        return self.open(lambda: graph, torch.get_num_threads(), ())

    @abstractmethod
    def integer_share(self, graph: bytes) -> str:
        """Return how many nodes run on integers, as text for the summary."""

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
            for dynamo, lengths in _attempts(task.lengths):
                if dynamo in hopeless:
                    continue
                try:
                    runtime = self if self.quantized else None
                    graph, interface = task.graph(runtime, dynamo, lengths)
                    module = EngineModule(self, graph, replace(interface, usual=usual))
                    self._compare(module, task, lengths)
                    self._warn_of_norms(module)
                    return module
                except ExportError as error:
                    log.debug("%s, dynamo=%s, %s: %s", self.label, dynamo, lengths, error)
                    problems.append(error)
                    if _depends_on_data(error):
                        hopeless.add(dynamo)
        raise _first_of(problems, self.label)

    def _warn_of_norms(self, module: EngineModule) -> None:
        """Warn of quantized layers that run in float for a BatchNorm that was not folded."""
        effect = self.unfolded_norms
        if not (self.quantized and effect):
            return
        with file_of(module.graph_bytes()) as path:
            layers = layers_in_front_of_norms(load_model(path, check=False), IN_FLOAT_FOR_NORMS)
        if layers:
            warnings.warn(
                f"deploy: target {self.label!r}: {norms_text(layers, effect)}", stacklevel=4
            )

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

    def _compare_on(self, module: EngineModule, task: Task, check: ReferenceCheck) -> str:
        """Raise an error if results differ, unless every layer agrees; return what is suspicious.

        Results that are as near as float32 and few codes explain need no closer look.
        """
        deviation = check.difference(module)
        if not deviation:
            return ""
        excuse = self.excuse()
        if excuse and not check.difference(module, RESULT_TOLERANCE):
            # Kernels of this machine overflow: what they give is near, but no layer is equal.
            return f"deploy: {excuse[0].lower()}{excuse[1:]} ({deviation}, for {check.what})"
        deviates = f"deploy: target {self.label!r}: {deviation}, for {check.what}"
        advice = self.excuse() or "Use another target"
        if not self.quantized:
            raise ExportError(f"{deviates}. {advice}")
        agrees, shows_session = _file_agrees(module, task, check.example)
        if not agrees:
            raise ExportError(f"{deviates}. {advice}")
        # Where the layers are those of the session, the module need only be this session.
        most = RESULT_TOLERANCE if shows_session else EQUAL_RESULTS
        if not runs_as_written(module, check.example, most):
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

    def compare_lengths(self, module: EngineModule, task: Task, lengths: OpenLengths) -> None:
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
            problem = check.difference(module)
            agrees = self.quantized and problem and _file_agrees(module, task, check.example)[0]
            if problem and not agrees:
                raise ExportError(
                    f"deploy: target {self.label!r}: for an example of another shape {problem}"
                )


def _depends_on_data(error: ExportError) -> bool:
    """Return True if no other open lengths mend what an exporter says of a forward."""
    return "data-dependent" in str(error) or WARNS in str(error)


def _first_of(problems: list[ExportError], label: str) -> ExportError:
    """Return the first problem, of which the advice is that of ``deploy``."""
    first = problems[0]
    if not isinstance(first, TorchExportError):
        return first
    reason = str(first).partition(". dynamo=")[0].removeprefix("export_onnx: ")
    return ExportError(
        f"deploy: target {label!r}: {reason}; expected a forward that one graph holds for all "
        "inputs. Use target='torch', which leaves such parts to Python"
    )


def _attempts(lengths: tuple[OpenLengths, ...]) -> Iterator[tuple[bool, OpenLengths]]:
    """Yield what to try in order: which exporter, and which lengths are open."""
    exporters = (True, False)
    for dynamo in exporters:
        for opened in lengths[:-1]:
            yield dynamo, opened
    for dynamo in exporters:
        yield dynamo, lengths[-1]


def _file_agrees(module: EngineModule, task: Task, example: Any) -> tuple[bool, bool]:
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
    by_one = [x for x in report.layers if x.allowed and not x.parameters and x.max_diff <= 1]
    agrees = bool(report.layers) and all(x.ok or x in by_one for x in report.layers)
    return agrees, report.shows_session


def _require_float32(model: nn.Module) -> None:
    """Raise an error if a model computes in another dtype than float32."""
    dtype = next((t.dtype for t in model.parameters() if t.is_floating_point()), torch.float32)
    if dtype is not torch.float32:
        raise ExportError(
            f"deploy: got a model in {dtype}; expected float32, which other engines run. Call "
            "model.float() before calibrating, or use target='torch'"
        )


class _Forward:
    """The forward of an :class:`EngineModule`, with the signature of the original's."""

    def __init__(self, module: EngineModule) -> None:
        self._module = module
        self.__signature__ = module.interface.signature.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._module.run(args, kwargs)


class EngineModule(nn.Module):
    """A calibrated model that another engine runs, for inference.

    Called as the original model, it returns results of the same structure: new tensors, which no
    later call overwrites. The graph is a buffer, so copies, files and state dicts hold it. The
    engine opens it at the first call, and once more for every number of threads that torch is set
    to (``torch.set_num_threads``). Several threads may call one module.

    Args:
        settings: the engine and its settings.
        graph: the bytes of an ONNX file, as a uint8 tensor.
        interface: what the graph takes and returns.
    """

    #: A call leaves nothing for the next one.
    is_stateless = True

    graph: Tensor
    _opened: dict[int, Run]
    _lock: threading.Lock

    def __init__(self, settings: GraphEngine, graph: Tensor, interface: GraphInterface) -> None:
        super().__init__()
        self.register_buffer("graph", graph)
        self.settings, self.interface = settings, interface
        self._reset()
        self.eval()

    def _reset(self) -> None:
        """Forget what the engine has opened, which can be neither copied nor saved."""
        vars(self).update(_opened=dict[int, Run](), _lock=threading.Lock())

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["_opened"], state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        loaded = state_dict.get(f"{prefix}graph")
        if loaded is not None and loaded.shape != self.graph.shape:
            self.graph = torch.empty_like(loaded, device=self.graph.device)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._reset()

    @property
    def target(self) -> str:
        """The name of the runtime."""
        return self.settings.name

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """Compute the results of the original model; a callable that has its signature.

        Raises:
            InputError: an argument has another name, number, dtype, shape or device than the
                graph takes; the text names it.
        """
        return _Forward(self)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the results of a call with the arguments of the original model."""
        device = self.settings.device
        feeds = self.interface.signature.bind(args, kwargs, device)
        feeds = {name: value.detach().contiguous() for name, value in feeds.items()}
        empty = any(value.shape[:1] == (0,) for value in feeds.values())
        tensors = self._run_empty(feeds) if empty else self._opened_run()(feeds)
        return self.interface.structure.rebuild(tensors)

    def _run_empty(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the results for no images: those for one image of zeros, without that image.

        The kernels of engines expect one image at least.
        """
        one = {
            name: value.new_zeros((max(1, value.shape[0]), *value.shape[1:]))
            for name, value in feeds.items()
        }
        pairs = zip(self._opened_run()(one), self.interface.open_results, strict=True)
        return [result[:0] if is_open else result for result, is_open in pairs]

    def _opened_run(self) -> Run:
        """Return the graph as the engine has opened it for the present number of threads."""
        threads = torch.get_num_threads()
        run = self._opened.get(threads)
        if run is None:
            with self._lock:
                run = self._opened.get(threads)
                if run is None:
                    read = partial(_bytes_of, self.graph)
                    usual = self.interface.usual
                    run = self._opened[threads] = self.settings.open(read, threads, usual)
        return run

    def graph_bytes(self) -> bytes:
        """Return the ONNX file that the engine runs."""
        return _bytes_of(self.graph)

    def summary_row(self) -> tuple[str, int, str]:
        """Return engine, bytes of the file, and which nodes run on integers."""
        note = (
            f"{self.settings.integer_share(self.graph_bytes())}; the ONNX file is inside the module"
        )
        return self.settings.label, self.graph.numel(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        signature = self.interface.signature
        inputs = ", ".join(graph_input.name for graph_input in signature.inputs)
        return f"{signature.model}({inputs}), {self.settings.label}"


def _bytes_of(graph: Tensor) -> bytes:
    return graph.cpu().numpy().tobytes()


def run_by_shape(
    open_for: Callable[[Shapes | None], Run], usual: Shapes, *, any_batch: bool = False
) -> Run:
    """Return a function of the inputs that opens the graph for their shapes where these are usual.

    Several threads may call it. A graph is opened when a call needs it first, and once.
    """
    key = _key(usual, any_batch)
    opened: dict[Shapes | None, Run] = {}
    lock = threading.Lock()

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        shapes = tuple((name, tuple(value.shape)) for name, value in feeds.items())
        fixed = usual if usual and _key(shapes, any_batch) == key else None
        run_graph = opened.get(fixed)
        if run_graph is None:
            with lock:
                run_graph = opened.get(fixed)
                if run_graph is None:
                    run_graph = opened[fixed] = open_for(fixed)
        return run_graph(feeds)

    return run


def _key(shapes: Shapes, any_batch: bool) -> Shapes:
    first = 1 if any_batch else 0
    return tuple((name, shape[first:]) for name, shape in shapes)
