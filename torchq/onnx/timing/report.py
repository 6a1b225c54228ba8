"""How long a file and its float one take, layer by layer, and the report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchq.onnx.timing.layers import FIRST
from torchq.utils import NotebookText, table

__all__ = ["LayerTime", "TimedNode", "TimeReport", "layer_times"]

#: A layer that loses less than this share of the time of the float file is not worth a line.
_LEAST_LOSS = 0.005


@dataclass(frozen=True)
class TimedNode:
    """A node of an optimised graph.

    Attributes:
        name: Its name in ONNX Runtime.
        kind: Its operator.
        layer: The layer that it belongs to.
        seconds: For one call, under ONNX Runtime's profiler.
    """

    name: str
    kind: str
    layer: str
    seconds: float


@dataclass(frozen=True)
class LayerTime:
    """A layer with all that is computed from its result up to the next layer.

    Attributes:
        name: Its dotted path; several where ONNX Runtime computes them together.
        nodes: Its nodes in the optimised graph of the file.
        float_nodes: Its nodes in the optimised graph of the float file.
    """

    name: str
    nodes: tuple[TimedNode, ...]
    float_nodes: tuple[TimedNode, ...]

    @property
    def seconds(self) -> float:
        """Seconds in the file."""
        return sum(node.seconds for node in self.nodes)

    @property
    def float_seconds(self) -> float:
        """Seconds in the float file."""
        return sum(node.seconds for node in self.float_nodes)

    @property
    def loss(self) -> float:
        """Seconds that the file takes longer; negative where it is faster."""
        return self.seconds - self.float_seconds

    def __str__(self) -> str:
        seconds: defaultdict[str, float] = defaultdict(float)
        for node in self.nodes:
            seconds[node.kind] += node.seconds
        most = sorted(seconds.items(), key=lambda pair: -pair[1])
        kinds = ", ".join(f"{kind} {_milliseconds(s)}" for kind, s in most)

        factor = f" ({self.seconds / self.float_seconds:.2f} times)" if self.float_seconds else ""
        return (
            f"{_milliseconds(self.seconds)} ms, {_milliseconds(self.float_seconds)} in float"
            f"{factor}: {kinds}"
        )


@dataclass(frozen=True)
class TimeReport(NotebookText):
    """What :func:`torchq.onnx.time_onnx` measured; ``print`` it.

    Attributes:
        path: The file.
        seconds: For one call of the file: the least of all samples, as interruptions only add time.
        float_seconds: The same for the float file.
        margin: How many times as long as in float is still called equal.
        threads: The number of threads of both.
        layers: Every layer, the one that loses the most first. Their times are those of ONNX
            Runtime's profiler, which adds about a microsecond to each node.
    """

    path: str
    seconds: float
    float_seconds: float
    margin: float
    threads: int
    layers: tuple[LayerTime, ...]

    @property
    def ratio(self) -> float:
        """Times that the file is faster than the float one."""
        return self.float_seconds / self.seconds

    @property
    def ok(self) -> bool:
        """True if the file is not slower than the float one, but for the margin."""
        return self.seconds <= self.margin * self.float_seconds

    @property
    def slower(self) -> tuple[LayerTime, ...]:
        """The layers that take longer than in float by more than the margin, the worst first."""
        least = _LEAST_LOSS * sum(layer.float_seconds for layer in self.layers)
        return tuple(
            layer
            for layer in self.layers
            if layer.loss > max(least, (self.margin - 1) * layer.float_seconds)
        )

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        line = (
            f"{self.path}: {_milliseconds(self.seconds)} ms, {_milliseconds(self.float_seconds)} "
            f"in float, {self.ratio:.2f} times as fast, on {threads}"
        )
        rows = [(layer.name, *str(layer).split(": ", 1)) for layer in self.slower]
        return "\n".join(
            [line, table([("slower layers", "time", "nodes"), *rows])] if rows else [line]
        )


def layer_times(
    nodes: Sequence[TimedNode], float_nodes: Sequence[TimedNode]
) -> tuple[LayerTime, ...]:
    """Return the layers of two files, the one that loses the most first.

    Layers that only one of the files runs as nodes of their own are joined with the next one.
    """
    sides = [_by_layer(side) for side in (nodes, float_nodes)]
    found: list[LayerTime] = []
    names: list[str] = []
    waiting: list[list[TimedNode]] = [[], []]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        names += [name] if name != FIRST else []
        for left, side in zip(waiting, sides, strict=True):
            left += side.get(name, ())
        if all(waiting):
            found.append(LayerTime(", ".join(names), tuple(waiting[0]), tuple(waiting[1])))
            names, waiting = [], [[], []]
    if any(waiting):
        found.append(LayerTime(", ".join(names) or FIRST, tuple(waiting[0]), tuple(waiting[1])))
    return tuple(sorted(found, key=lambda layer: -layer.loss))


def _by_layer(nodes: Sequence[TimedNode]) -> dict[str, list[TimedNode]]:
    found: dict[str, list[TimedNode]] = {}
    for node in nodes:
        found.setdefault(node.layer, []).append(node)
    return found


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"
