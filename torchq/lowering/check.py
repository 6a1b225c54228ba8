"""Comparison of a deployed model with the simulation that it was made from.

A deep network may amplify one code that falls the other way at a tie until no result agrees. Giving
every layer the inputs that it has in the simulation tells that from a wrong layer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_model, tensors_in
from torchq.lowering.layer import Int8Layer
from torchq.workflow import disabled

#: The relative error of a result that is always allowed: -20 dB.
RESULT_TOLERANCE = 0.1
#: The share of codes that may be off by one when layers are given the inputs of the simulation.
#: Measured: at most 3e-5 in MobileNetV3 and U-Nets with random weights.
CODES_OFF = 0.01
#: The relative error of floating-point tensors in the same situation.
LAYER_TOLERANCE = 0.01


class Verdict(NamedTuple):
    """The outcome of a comparison: what is wrong with results, or suspicious where they agree."""

    problem: str = ""
    note: str = ""


class ReferenceCheck:
    """The results of the simulation for an example, to compare the results of others with.

    Calling the check with a model returns a :class:`Verdict`. It raises what the model raises.
    """

    def __init__(self, simulated: nn.Module, example: Any) -> None:
        self._simulated, self._example = simulated, example
        self._expected = _results(simulated, example)
        for number, expected in enumerate(self._expected):
            if bool(expected.isnan().any()):
                raise ExportError(
                    f"deploy: result {number} of the simulation is NaN for the example; expected "
                    "numbers to compare with. torchq.layer_errors names the layer it comes from"
                )
        with disabled(simulated):
            floats = _results(simulated, example)
        pairs = zip(self._expected, floats, strict=True)
        self._allowed = [_allowed_error(expected, exact) for expected, exact in pairs]

    def __call__(self, model: nn.Module) -> Verdict:
        """Run ``model`` on the example and return how its results compare."""
        problem = self.difference(model)
        if not problem:
            return Verdict()
        layer = differing_layer(model, self._simulated, self._example)
        if layer is None:
            return Verdict(note=f"{problem}, though every layer agrees when given the same input")
        return Verdict(f"{problem}. Given the inputs of the simulation, {layer}")

    def difference(self, model: nn.Module) -> str:
        """Return which result of ``model`` differs by more than is allowed; "" if none does."""
        results = _results(model, self._example)
        if len(results) != len(self._expected):
            return f"the model returns {len(results)} tensors; expected {len(self._expected)}"
        for number, (expected, got) in enumerate(zip(self._expected, results, strict=True)):
            if got.shape != expected.shape:
                shapes = f"{tuple(got.shape)}; expected {tuple(expected.shape)}"
                return f"result {number} has shape {shapes}"
        pairs = zip(self._expected, self._allowed, results, strict=True)
        for number, (expected, allowed, got) in enumerate(pairs):
            error = _distance(got, expected)
            if not error <= allowed:
                return (
                    f"result {number} has relative error {_ratio(error, expected)} against the "
                    f"simulation; expected at most {_ratio(allowed, expected)}, the larger one of "
                    "0.1 and what quantization itself makes"
                )
        return ""


def _ratio(error: float, expected: Tensor) -> str:
    size = _norm(expected)
    return f"{error / size:.2g}" if size else "inf"


def _results(model: nn.Module, example: Any) -> list[Tensor]:
    with torch.no_grad():
        return list(tensors_in(call_model(model, example)))


def _norm(x: Tensor) -> float:
    return float(x.double().masked_fill(x.isinf(), 0).norm())


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, in which infinity equals itself: masks are made of it."""
    return float((a.double() - b.double()).masked_fill(a == b, 0).norm())


def _allowed_error(expected: Tensor, exact: Tensor) -> float:
    """Return the norm of the error that a deployed model may have without a closer look.

    Every tie that falls the other way makes another sample of the quantization noise; two samples
    differ by sqrt(2) times either.
    """
    usual = RESULT_TOLERANCE * _norm(expected)
    if exact.shape != expected.shape:  # a selection, whose size depends on the values
        return usual
    return max(usual, 2**0.5 * _distance(expected, exact))


def differing_layer(model: nn.Module, simulated: nn.Module, example: Any) -> str | None:
    """Return which layer of a deployed model computes something else than the simulation.

    Every integer layer reads what the layer of the same name reads in the simulation. The codes
    that it would have read otherwise come from such inputs too, so that errors do not add up: they
    belong to the layers just before.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Int8Layer)}
    inputs, expected = _record_inputs(simulated, example, {_original(path) for path in layers})
    differences: list[str] = []
    given: list[Tensor] = []

    def hook_of(path: str) -> Callable[[nn.Module, tuple[Any, ...]], Any]:
        def force(layer: nn.Module, args: tuple[Any, ...]) -> Any:
            assert isinstance(layer, Int8Layer)
            left = inputs.get(_original(path))
            # A layer may hand its input to a twin, which calls this hook once more.
            if not left or not args or any(args[0] is x for x in given):
                return None
            want = left.pop(0)
            if args[0].dtype is torch.uint8:
                want = layer.input_qparams.quantize(want)
            if args[0].shape != want.shape or not _agree(args[0], want):
                differences.append(f"the input of {path} differs")
            given.append(want)
            return (want, *args[1:])

        return force

    with ExitStack() as stack:
        for path, layer in layers.items():
            stack.callback(layer.register_forward_pre_hook(hook_of(path)).remove)
        results = _results(model, example)
    if differences:
        return differences[0]
    if len(results) != len(expected):
        return "the number of results differs"
    for number, (got, want) in enumerate(zip(results, expected, strict=True)):
        if got.shape != want.shape or not _agree(got, want):
            return f"result {number} differs"
    return None


def _original(path: str) -> str:
    """Return the path of a layer in the simulation: variants of it have a longer name."""
    return path.partition("_again")[0]


def _record_inputs(
    simulated: nn.Module, example: Any, paths: set[str]
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Return the inputs of the layers at ``paths``, call by call, and the results."""
    inputs: dict[str, list[Tensor]] = {}

    def recorder(path: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def record(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs.setdefault(path, []).extend(x.detach().clone() for x in args[:1])

        return record

    with ExitStack() as stack:
        for path, module in simulated.named_modules():
            if path in paths:
                stack.callback(module.register_forward_pre_hook(recorder(path)).remove)
        return inputs, _results(simulated, example)


def _agree(got: Tensor, want: Tensor) -> bool:
    """Return True if two tensors of values, or of codes, differ by no more than rounding."""
    if got.dtype is torch.uint8:
        off = float((got.int() - want.int()).abs().sum())
        return off <= max(2.0, CODES_OFF * got.numel())
    return _distance(got, want) <= LAYER_TOLERANCE * _norm(want)
