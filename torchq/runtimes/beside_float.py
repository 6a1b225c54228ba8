"""How fast and how large a calibrated model is on its runtime, beside the float model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from torchq.errors import TorchqError
from torchq.runtime import planned_runtime
from torchq.runtimes.timing import (
    call_in_words,
    can_be_timed,
    is_faster,
    milliseconds,
    timer_of,
)
from torchq.utils import network_of
from torchq.utils.timing import Samples


@dataclass(frozen=True)
class Speed:
    """How fast and how large a model is on a runtime, in float and quantized; ``print`` it.

    Attributes:
        target: the name of the runtime.
        in_float: times of one call of the float model.
        quantized: times of one call of the quantized one.
        bytes: of the files of both, in this order.
        call: what was timed, in words.
    """

    target: str
    in_float: Samples
    quantized: Samples
    bytes: tuple[int, int]
    call: str

    @property
    def gain(self) -> float:
        """The time of the float model over that of the quantized one."""
        return self.in_float.median / self.quantized.median

    @property
    def is_faster(self) -> bool:
        """True if the quantized model is faster by more than the times are off by."""
        return is_faster(self.quantized, self.in_float)

    def __str__(self) -> str:
        before, after = (count / 1e6 for count in self.bytes)
        verdict = f"{self.gain:.2f}x" + ("" if self.is_faster else ", no faster")
        return (
            f"{self.target}: {milliseconds(self.quantized)}, float "
            f"{milliseconds(self.in_float)} ({verdict}); {after:.3g} MB, float {before:.3g} MB; "
            f"{self.call}"
        )


def speed(
    model: nn.Module, example: object, time: Callable[[Path], float] | None = None
) -> Speed:
    """Time a calibrated model on its runtime, and the float model beside it.

    Args:
        model: quantized for a target, and calibrated; left unchanged.
        example: arguments for one call; their batch and their size are what is timed.
        time: as for :class:`Pays`.

    Raises:
        ConfigError: The model has no target, or its runtime is not here and there is no ``time``.
        TorchqError: The runtime cannot run the model.
    """
    model = network_of(model)
    runtime = planned_runtime(model)
    with timer_of("speed", runtime, example, time) as timer:
        files = [timer.file(model, quantized=quantized) for quantized in (False, True)]
        before, after = timer.times(files)
        sizes = timer.size(files[0]), timer.size(files[1])
    return Speed(timer.runtime.name, before, after, sizes, call_in_words(example))


def speed_line(model: nn.Module, example: object) -> str:
    """Return :func:`speed` as a line for a report.

    It is "" where the runtime of the model is not here, and says why where it cannot run the model.
    """
    if not can_be_timed(planned_runtime(model)):
        return ""
    try:
        return str(speed(model, example))
    except TorchqError as error:
        return f"not timed: {error}"
