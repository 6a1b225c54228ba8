"""A deployed model that another library runs, as a module with the signature of the original."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchq.engines.interface.signature import CallSignature
from torchq.engines.interface.structure import Structure

__all__ = [
    "EngineModule",
    "GraphInterface",
    "OpensGraphs",
    "ReadGraph",
    "Run",
    "Shapes",
    "run_by_shape",
]

#: The shape of each input of a call, by name.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
#: Computes the outputs of a graph, in order, from its inputs by name. Several threads may call it.
Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
#: Returns the bytes of an ONNX file, a new copy for each call.
ReadGraph = Callable[[], bytes]


@dataclass(frozen=True)
class GraphInterface:
    """What a graph takes and returns, seen from Python.

    Attributes:
        signature: of the call.
        structure: of the results.
        open_results: for each output of the graph, True if its length in dimension 0 depends on
            the inputs.
        usual: the shapes of calls that will be common.
    """

    signature: CallSignature
    structure: Structure
    open_results: tuple[bool, ...]
    usual: tuple[Shapes, ...] = ()


class OpensGraphs(Protocol):
    """An engine that runs ONNX files; see :class:`torchq.engines.GraphEngine`."""

    @property
    def name(self) -> str:
        """The name of the engine."""

    @property
    def label(self) -> str:
        """The name with the numbers that it computes with."""

    @property
    def device(self) -> torch.device:
        """Return where the tensors of a call have to be."""

    def open(self, read: ReadGraph, threads: int, usual: tuple[Shapes, ...]) -> Run:
        """Return an ONNX file as a function of its inputs."""

    def placement(self, graph: bytes) -> str:
        """Return how many nodes run on integers, as text."""


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

    Attributes:
        graph: see above.
        settings: see above.
        interface: see above.
    """

    graph: Tensor
    _opened: dict[int, Run]
    _lock: threading.Lock

    def __init__(self, settings: OpensGraphs, graph: Tensor, interface: GraphInterface) -> None:
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
    def engine(self) -> str:
        """The name of the engine."""
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
        """Return the results of a call.

        Args:
            args: positional arguments of the original model.
            kwargs: its keyword arguments.
        """
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
                    read, usual = partial(_bytes_of, self.graph), self.interface.usual
                    run = self._opened[threads] = self.settings.open(read, threads, usual)
        return run

    def graph_bytes(self) -> bytes:
        """Return the ONNX file that the engine runs."""
        return _bytes_of(self.graph)

    def summary_row(self) -> tuple[str, int, str]:
        """Return engine, bytes of the file, and which nodes run on integers."""
        note = f"{self.settings.placement(self.graph_bytes())}; the ONNX file is inside the module"
        return self.settings.label, self.graph.numel(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        signature = self.interface.signature
        inputs = ", ".join(graph_input.name for graph_input in signature.inputs)
        return f"{signature.model}({inputs}), {self.settings.label}"


def _bytes_of(graph: Tensor) -> bytes:
    return graph.cpu().numpy().tobytes()


def run_by_shape(
    open_for: Callable[[Shapes | None], Run],
    usual: Collection[Shapes],
    *,
    any_batch: bool = False,
) -> Run:
    """Return a function of the inputs that opens the graph for their shapes where these are usual.

    Several threads may call it. A graph is opened when a call needs it first, and once.

    Args:
        open_for: Opens the graph for some shapes, or, for None, for all.
        usual: The shapes of calls that will be common.
        any_batch: What is opened for some shapes takes others with another first dimension too.
    """
    chosen = {_key(shapes, any_batch): shapes for shapes in usual}
    opened: dict[Shapes | None, Run] = {}
    lock = threading.Lock()

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        shapes = tuple((name, tuple(value.shape)) for name, value in feeds.items())
        wanted = chosen.get(_key(shapes, any_batch))
        found = opened.get(wanted)
        if found is None:
            with lock:
                found = opened.get(wanted)
                if found is None:
                    found = opened[wanted] = open_for(wanted)
        return found(feeds)

    return run


def _key(shapes: Shapes, any_batch: bool) -> Shapes:
    first = 1 if any_batch else 0
    return tuple((name, shape[first:]) for name, shape in shapes)
