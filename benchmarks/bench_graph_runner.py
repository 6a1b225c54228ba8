"""The overhead of ``GraphRunner`` per node, and the values it keeps alive, beside fx.Interpreter.

A chain of additions on eight numbers shows the overhead, as its arithmetic takes next to no time.
Networks of torchvision show what is left of it. Peak live bytes are those of tensors that operators
made, without parameters and inputs, counted once per storage. An interpreter that frees nothing
stands beside them as the upper end.

``--agreement`` times nothing: it runs every classifier of torchvision, and reports if the runner
gives the values of the model bit for bit. A second run goes on where the first one ended.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.conformance_onnx import classifier_names, network
from benchmarks.harness import Reporter, compare, parse, parser, timing
from torchq.graph import GraphRunner, tensors_in, trace

CHAIN = 300  # nodes
OVERHEAD_LIMIT = 1.3  # of fx.Interpreter
NETWORKS = ("resnet18", "mobilenet_v2", "googlenet")


class Chain(nn.Module):
    """Additions that do next to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(CHAIN):
            x = x + 1
        return x


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs or {}))}
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and storage.data_ptr() not in self._live:
                self._live[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self._live.pop, storage.data_ptr(), None)
        self.peak = max(self.peak, sum(self._live.values()))
        return out


def peak_bytes(call: Callable[[], object]) -> int:
    with LiveBytes() as live:
        call()
    return live.peak


def candidates(traced: fx.GraphModule, model: nn.Module, x: Tensor) -> dict[str, Callable[[], Any]]:
    runner, interpreter = GraphRunner(traced), fx.Interpreter(traced)
    found = {
        "eager": lambda: model(x),
        "fx.Interpreter": lambda: interpreter.run(x),
        "torchq": lambda: runner.run(x),
    }
    expected = found["eager"]()
    assert all(torch.equal(call(), expected) for call in found.values())
    return found


def agreement(known: Path | None) -> Iterator[dict[str, Any]]:
    """Yield for each classifier that is not in a file yet if its runner gives equal values."""
    lines = known.read_text(encoding="utf-8").splitlines() if known and known.exists() else []
    done = {row["model"] for row in map(json.loads, lines) if "equal" in row}
    for name in classifier_names():
        if name not in done:
            model, x = network(name)
            found = trace(model, x)
            equal = torch.equal(GraphRunner(found.graph_module).run(x), model(x))
            yield {"model": name, "level": found.level, "equal": equal}


def main(argv: Sequence[str] | None = None) -> None:
    found = parser(__doc__)
    found.add_argument("--agreement", action="store_true", help="compare values, time nothing")
    options = parse(found, argv)
    if options.agreement:
        with Reporter("graph_runner", options.out) as report, torch.no_grad():
            for row in agreement(options.out):
                report.value(**row)
        return
    models: dict[str, tuple[nn.Module, Tensor]] = {"chain": (Chain(), torch.zeros(8))}
    for name in NETWORKS:
        given = {"init_weights": False} if name == "googlenet" else {}
        network = getattr(torchvision.models, name)(weights=None, **given)
        models[name] = (network, torch.randn(1, 3, 64, 64))
    with Reporter("graph_runner", options.out) as report, torch.no_grad():
        for name, (model, x) in models.items():
            traced = trace(model.eval(), x).graph_module
            nodes, calls = len(traced.graph.nodes), candidates(traced, model, x)
            rows = compare(calls, baseline="fx.Interpreter", **timing(options))
            for row in rows:
                report.timing(row, model=name, nodes=nodes)
            eager, _, ours = (row.median_s for row in rows)
            keeping = fx.Interpreter(traced, garbage_collect_values=False)
            peaks = {f"{key}_peak_bytes": peak_bytes(call) for key, call in calls.items()}
            overhead = (ours - eager) / nodes if name == "chain" else None
            report.value(
                model=name,
                nodes=nodes,
                overhead_s_per_node=overhead,
                ratio_limit=OVERHEAD_LIMIT,
                **peaks,
                kept_peak_bytes=peak_bytes(lambda keeping=keeping, x=x: keeping.run(x)),
            )


if __name__ == "__main__":
    main()
