"""The checks by the kind of what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from torchq.analysis.diagnosis.finding import Finding
from torchq.analysis.diagnosis.observation import Observation
from torchq.nn import TensorQuantizer
from torchq.utils import Registry

__all__ = ["CHECKS", "Check", "Patient", "check"]


@dataclass(frozen=True)
class Patient:
    """A model under examination.

    Attributes:
        model: the quantized model.
        quantizers: all its quantizers by path.
        weights: ids of those that quantize weights.
        seen: what a run on batches showed; None without batches.
        targets: runtimes that it is meant for.
    """

    model: nn.Module
    quantizers: dict[str, TensorQuantizer]
    weights: set[int]
    seen: Observation | None
    targets: tuple[str, ...] = ()

    @property
    def active(self) -> dict[str, TensorQuantizer]:
        """The quantizers that are on."""
        return {path: q for path, q in self.quantizers.items() if q.quantizing}


@dataclass(frozen=True)
class Check:
    """Looks for one kind of fault.

    Attributes:
        find: yields the findings.
        needs_batches: it can find nothing without a run.
    """

    find: Callable[[Patient], Iterator[Finding]]
    needs_batches: bool


#: Kind -> check. One more is a function under ``@check``.
CHECKS: Registry[str, Check] = Registry("check")


def check(
    kind: str, *, needs_batches: bool = False
) -> Callable[[Callable[[Patient], Iterator[Finding]]], Callable[[Patient], Iterator[Finding]]]:
    """Return a decorator that enters a function as the check for ``kind``.

    Args:
        kind: of the findings.
        needs_batches: the check can find nothing without a run.
    """

    def enter(
        function: Callable[[Patient], Iterator[Finding]],
    ) -> Callable[[Patient], Iterator[Finding]]:
        CHECKS.add(kind, Check(function, needs_batches))
        return function

    return enter
