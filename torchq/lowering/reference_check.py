"""Comparison of a deployed model with the simulation that it was made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model, tensors_in
from torchq.workflow import disabled

__all__ = ["ReferenceCheck"]

#: The relative error that is always allowed: -20 dB.
TOLERANCE = 0.1


class ReferenceCheck:
    """The results of the simulation for an example, to compare the results of others with.

    Calling the check with a model returns what is wrong with the results of that model, or an
    empty string if they agree. It raises what the model raises.

    Args:
        simulated: a calibrated model.
        example: see :func:`torchq.graph.call_model`.
    """

    def __init__(self, simulated: nn.Module, example: Any) -> None:
        self._example = example
        self._expected = self._results(simulated)
        with disabled(simulated):
            floats = self._results(simulated)
        pairs = zip(self._expected, floats, strict=True)
        self._allowed = [_allowed_error(expected, exact) for expected, exact in pairs]

    def __call__(self, model: nn.Module) -> str:
        results = self._results(model)
        pairs = zip(self._expected, self._allowed, results, strict=True)
        for number, (expected, allowed, got) in enumerate(pairs):
            if problem := _difference(expected, allowed, got):
                return f"result {number} {problem}"
        return ""

    def _results(self, model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return list(tensors_in(call_model(model, self._example)))


def _allowed_error(expected: Tensor, exact: Tensor) -> Tensor:
    """Return the norm of the error that a correct deployed model may have.

    Float32 rounds differently next to a tie, and a deep network turns every such tie into another
    sample of its quantization noise. Two samples differ by sqrt(2) times either.

    Args:
        expected: a result of the simulation.
        exact: the same result without quantization.
    """
    noise = 2**0.5 * (expected.double() - exact.double()).norm()
    return torch.maximum(TOLERANCE * expected.double().norm(), noise)


def _difference(expected: Tensor, allowed: Tensor, got: Tensor) -> str:
    """Return how ``got`` exceeds the allowed error; an empty string if it does not."""
    if expected.shape != got.shape:
        return f"has shape {tuple(got.shape)}; expected {tuple(expected.shape)}"
    error, size = (got.double() - expected.double()).norm(), expected.double().norm()
    if bool(error <= allowed):
        return ""
    return (
        f"has relative error {float(error / size):.2g} against the simulation; expected at most "
        f"{float(allowed / size):.2g}, the larger one of 0.1 and what quantization itself makes"
    )
