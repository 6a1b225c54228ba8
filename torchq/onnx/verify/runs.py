"""The float model, the simulation, the file here and the file on an emulator, beside each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from torchq.graph import map_tensors
from torchq.onnx.verify.report import Output, RunAgreement, Verdict, add_outputs

#: Whole results may be twice as far from the simulation as that is from the float model, as they
#: are two roundings of one model. And they may be this far anyway, where both are near: what stays
#: float on a chip is float16, and a few roundings to its 11 bits are a relative error of 3e-3.
_TWICE_DB, _NEAR_DB = 6.02, 50.0
FLOAT, SIMULATION = "float model", "simulation"

Metric = Callable[[Any, Any], Any]


class _Run:
    """One way to run a model, accumulated over batches."""

    def __init__(self, what: str, names: Sequence[str]) -> None:
        self.what = what
        self.beside_float = [Output(name) for name in names]
        self.beside_simulation = [Output(name) for name in names]
        self._scores: list[tuple[float, int]] = []

    def add_score(self, score: Any, size: int) -> None:
        """Add what the user's metric says of one batch."""
        self._scores.append((float(score), size))

    def levels(self, outputs: Sequence[Output]) -> list[float]:
        """Return how near each output is, in dB."""
        return [output.result().sqnr_db for output in outputs]

    def result(self) -> RunAgreement:
        """Return the figures over all batches."""
        classes = [output.result().top1 for output in self.beside_float]
        shares = [share for share in classes if share is not None]
        count = sum(size for _, size in self._scores)
        total = sum(score * size for score, size in self._scores)
        return RunAgreement(
            self.what,
            min(self.levels(self.beside_float)),
            min(self.levels(self.beside_simulation)),
            min(shares, default=None),
            total / count if count else None,
        )


def _filled(structure: object, tensors: list[Tensor]) -> Any:
    """Return a model's output with other tensors in it, in order."""
    rest = iter(tensors)
    return map_tensors(structure, lambda _: next(rest))


class Runs:
    """All ways to run a model, one batch after the other.

    Args:
        names: of the outputs of its file.
        ways: what they are called, but for the float model and the simulation.
        metric: the user's; may be None.
    """

    def __init__(
        self, names: Sequence[str], ways: Sequence[str], metric: Metric | None
    ) -> None:
        self._names = names
        self._metric = metric
        self._runs = [_Run(way, names) for way in (FLOAT, SIMULATION, *ways)]

    def add(
        self, batch: object, structure: object, results: Sequence[list[Tensor]]
    ) -> None:
        """Add the results of all runs on one batch, in order; ``structure`` is a model's output."""
        in_float, simulated = results[:2]
        for run, outputs in zip(self._runs, results, strict=True):
            add_outputs(run.beside_float, in_float, outputs)
            add_outputs(run.beside_simulation, simulated, outputs)
            if self._metric is not None:
                output = _filled(structure, outputs)
                size = len(in_float[0]) if in_float and in_float[0].dim() else 1
                run.add_score(self._metric(output, batch), size)

    def results(self) -> tuple[RunAgreement, ...]:
        """Return the figures over all batches."""
        return tuple(run.result() for run in self._runs)

    def verdict(self) -> Verdict:
        """Return whether the last run is as near to the simulation as quantization explains."""
        last = self._runs[-1]
        noise = last.levels(self._runs[1].beside_float)
        for name, level, usual in zip(
            self._names, last.levels(last.beside_simulation), noise, strict=True
        ):
            if not level >= min(_NEAR_DB, usual - _TWICE_DB):
                reason = (
                    f"output {name} is {level:.1f} dB from the simulation, which is {usual:.1f} "
                    "dB from the float model. If every layer agrees alone, the chip's compiler "
                    "joins some and computes them wrongly"
                )
                return Verdict(f"the whole file on {last.what}", False, reason)
        return Verdict(f"the whole file on {last.what}", True)
