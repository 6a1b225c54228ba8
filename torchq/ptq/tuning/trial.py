"""One row of the table of :func:`torchq.tune`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TuneTrial"]


@dataclass(frozen=True)
class TuneTrial:
    """One row of the table of :func:`torchq.tune`.

    Attributes:
        change: what was changed from the best settings before it.
        metric: of the quantized model; NaN if it could not be made.
        mean_bits: the mean width of the weights of Linear and Conv layers and of all quantized
            ones; 32 where a weight is float; NaN if the model could not be made.
        seconds: that the trial took.
        error: why it could not be made, else "".
        settings: the settings, as JSON text.
    """

    change: str
    metric: float
    mean_bits: float
    seconds: float
    error: str = ""
    settings: str = ""
