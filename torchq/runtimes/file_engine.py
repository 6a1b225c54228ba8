"""Engines that run a file: what they are asked for, and the module that holds the file."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.runtimes.engine import Engine
from torchq.runtimes.interface import GraphInterface, ReadGraph, Run, Shapes

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, repr=False)
class FileEngine(Engine):
    """A runtime that runs a file which was made for it, inside an :class:`EngineModule`."""

    @abstractmethod
    def open(self, read: ReadGraph, threads: int, usual: Shapes) -> Run:
        """Return a file as a function of its inputs.

        Args:
            read: returns the file. The module holds it already, so a function that needs it later
                had better keep ``read`` than a copy.
            threads: the number of threads that compute one call.
            usual: the shapes of the example; others are possible too.

        Raises:
            ExportError: the engine cannot run the file.
        """

    @abstractmethod
    def integer_share(self, module: EngineModule) -> str:
        """Return how much of a file runs on integers, as text for the summary."""


class _Forward:
    """The forward of an :class:`EngineModule`, with the signature of the original's."""

    def __init__(self, module: EngineModule) -> None:
        self._module = module
        self.__signature__ = module.interface.signature.parameters

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._module.run(args, kwargs)


class EngineModule(nn.Module):
    """A calibrated model that another engine runs, for inference.

    Called as the original model, it returns results of the same structure: new tensors, which no
    later call overwrites. The graph is a buffer, so copies, files and state dicts hold it. The
    engine opens it at the first call, and once more for every number of threads that torch is set
    to (``torch.set_num_threads``). Several threads may call one module.

    Args:
        settings: the engine and its settings.
        graph: the bytes of the file, as a uint8 tensor.
        interface: what the graph takes and returns.
        report: what the engine said of the file when it was made, if it does.
    """

    #: A call leaves nothing for the next one.
    is_stateless = True

    graph: Tensor
    _opened: dict[int, Run]
    _lock: threading.Lock

    def __init__(
        self,
        settings: FileEngine,
        graph: Tensor,
        interface: GraphInterface,
        report: object = None,
    ) -> None:
        super().__init__()
        self.register_buffer("graph", graph)
        self.settings = settings
        self.interface = interface
        self.report = report
        self._reset()
        self.eval()

    def _reset(self) -> None:
        """Forget what the engine has opened, which can be neither copied nor saved."""
        vars(self).update(_opened=dict[int, Run](), _lock=threading.Lock())

    def __getstate__(self) -> dict[str, Any]:
        state = dict(vars(self))
        del state["_opened"], state["_lock"]
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._reset()

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: object
    ) -> None:
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

    def run(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Return the results of a call with the arguments of the original model."""
        feeds = self.interface.signature.bind(args, kwargs, _CPU)
        feeds = {name: value.detach().contiguous() for name, value in feeds.items()}
        if _has_no_images(feeds):
            return self.interface.structure.rebuild(self._run_empty(feeds))
        return self.interface.structure.rebuild(self._opened_run()(feeds))

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
                    run = self._opened[threads] = self.settings.open(
                        read, threads, usual
                    )
        return run

    def graph_bytes(self) -> bytes:
        """Return the file that the engine runs."""
        return _bytes_of(self.graph)

    def summary_row(self) -> tuple[str, int, str]:
        """Return engine, bytes of the file, and how much of it runs on integers."""
        note = f"{self.settings.integer_share(self)}; the file is inside the module"
        return self.settings.label, self.graph.numel(), note

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        signature = self.interface.signature
        inputs = ", ".join(graph_input.name for graph_input in signature.inputs)
        return f"{signature.model}({inputs}), {self.settings.label}"


def _has_no_images(feeds: Mapping[str, Tensor]) -> bool:
    # A loop, as this runs in each call and a generator takes three times as long.
    for value in feeds.values():  # noqa: SIM110
        if not value.numel() and value.shape[0] == 0:
            return True
    return False


def _bytes_of(graph: Tensor) -> bytes:
    return graph.cpu().numpy().tobytes()


def run_by_shape(
    open_for: Callable[[Shapes | None], Run], usual: Shapes, *, any_batch: bool = False
) -> Run:
    """Return a function of the inputs that opens the graph for their shapes where these are usual.

    Several threads may call it. A graph is opened when a call needs it first, and once.
    """
    first = 1 if any_batch else 0
    usual_lengths = {name: shape[first:] for name, shape in usual}
    opened: dict[Shapes | None, Run] = {}
    lock = threading.Lock()

    def is_usual(feeds: Mapping[str, Tensor]) -> bool:
        return feeds.keys() == usual_lengths.keys() and all(
            feeds[name].shape[first:] == lengths
            for name, lengths in usual_lengths.items()
        )

    def run(feeds: Mapping[str, Tensor]) -> list[Tensor]:
        fixed = usual if usual and is_usual(feeds) else None
        run_graph = opened.get(fixed)
        if run_graph is None:
            with lock:
                run_graph = opened.get(fixed)
                if run_graph is None:
                    run_graph = opened[fixed] = open_for(fixed)
        return run_graph(feeds)

    return run
