"""Comparison of a deployed model with the simulation that it was made from.

A deep network may amplify one code that falls the other way at a tie until no result agrees. Giving
every layer the inputs that it has in the simulation tells that from a wrong layer.
"""

import math
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_model, tensors_in
from torchq.lowering.layer import Int8Layer
from torchq.utils import state_kept, watching
from torchq.workflow import disabled

#: The relative error of a result that is always allowed: -20 dB.
RESULT_TOLERANCE = 0.1
#: The share of codes that may be off by one, and the relative error of floating-point tensors,
#: when layers are given the inputs of the simulation. Measured: at most 3e-5 of the codes.
LAYER_TOLERANCE = 0.01


class ReferenceCheck:
    """The results of the simulation for an example, to compare the results of others with.

    ``outcome`` is what the simulation returned.
    """

    def __init__(self, simulated: nn.Module, example: Any) -> None:
        self._simulated, self._example = simulated, example
        with torch.no_grad(), state_kept(simulated):
            self.outcome = call_model(simulated, example)
        self._expected = list(tensors_in(self.outcome))
        for number, expected in enumerate(self._expected):
            if bool(expected.isnan().any()):
                raise ExportError(
                    f"deploy: result {number} of the simulation is NaN for the example; expected "
                    "numbers to compare with. torchq.layer_errors names the layer it comes from"
                )

    @cached_property
    def _float_results(self) -> list[Tensor]:
        """The results without quantization; hardly a model needs them."""
        with disabled(self._simulated):
            return _results(self._simulated, self._example)

    def __call__(self, model: nn.Module) -> tuple[str, str]:
        """Return what is wrong with the results of ``model``, and what is suspicious; may be ""."""
        problem = self.difference(model)
        if not problem:
            return "", ""
        pairs = forced_pairs(model, self._simulated, self._example)
        layer = next((what for what, got, want in pairs if not _agree(got, want)), None)
        if layer is None:
            return "", f"{problem}, though every layer agrees when given the same input"
        return f"{problem}. Given the inputs of the simulation, {layer} differs", ""

    def difference(self, model: nn.Module) -> str:
        """Return which result of ``model`` differs by more than is allowed; "" if none does."""
        results = _results(model, self._example)
        if len(results) != len(self._expected):
            return f"the model returns {len(results)} tensors; expected {len(self._expected)}"
        for number, (expected, got) in enumerate(zip(self._expected, results, strict=True)):
            if got.shape != expected.shape:
                shapes = f"{tuple(got.shape)}; expected {tuple(expected.shape)}"
                return f"result {number} has shape {shapes}"
            error, allowed = distance(got, expected), RESULT_TOLERANCE * norm(expected)
            if not error <= allowed:
                allowed = _allowed_error(expected, self._float_results[number])
            if not error <= allowed:
                return (
                    f"result {number} has relative error {_ratio(error, expected)} against the "
                    f"simulation; expected at most {_ratio(allowed, expected)}, the larger one of "
                    "0.1 and what quantization itself makes"
                )
        return ""

    def found(self, model: nn.Module) -> str:
        """Return in a line how far the results of ``model`` agree with those of the simulation."""
        texts = []
        pairs = zip(_results(model, self._example), self._expected, strict=True)
        for number, (got, expected) in enumerate(pairs):
            error, size = distance(got, expected), norm(expected)
            level = f"{20 * math.log10(size / error):.1f} dB" if error and size else "equal"
            texts.append(f"result {number} {level if not error or size else 'differs'}")
        shown = ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")
        return f"compared with the simulation on the example: {shown or 'no tensor'}"


def _ratio(error: float, expected: Tensor) -> str:
    size = norm(expected)
    return f"{error / size:.2g}" if size else "inf"


def _results(model: nn.Module, example: Any) -> list[Tensor]:
    with torch.no_grad(), state_kept(model):
        return list(tensors_in(call_model(model, example)))


def norm(x: Tensor) -> float:
    """Return the norm of the finite numbers in float64."""
    return float(x.double().masked_fill(x.isinf(), 0).norm())


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, in which infinity equals itself: masks are made of it."""
    return float((a.double() - b.double()).masked_fill(a == b, 0).norm())


def _allowed_error(expected: Tensor, exact: Tensor) -> float:
    """Return the norm of the error that a deployed model may have without a closer look."""
    usual = RESULT_TOLERANCE * norm(expected)
    if exact.shape != expected.shape:  # a selection, whose size depends on the values
        return usual
    # Ties that fall the other way are another sample of the noise: sqrt(2) of it apart.
    return max(usual, 2**0.5 * distance(expected, exact))


def forced_pairs(
    model: nn.Module, simulated: nn.Module, example: Any
) -> list[tuple[str, Tensor, Tensor]]:
    """Return what each layer of a deployed model got and should get, and the same of results.

    Every integer layer reads what the layer of the same name reads in the simulation. What it would
    have read otherwise comes from such inputs too, so that errors do not add up: they belong to the
    layers just before. Codes are compared as codes.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Int8Layer)}
    inputs: dict[str, list[Tensor]] = {}
    pairs: list[tuple[str, Tensor, Tensor]] = []

    def record(path: str, args: tuple[Any, ...], *_: Any) -> None:
        inputs.setdefault(path, []).extend(x.detach().clone() for x in args[:1])

    def force(path: str, layer: Int8Layer, args: tuple[Any, ...]) -> Any:
        left = inputs.get(_original(path))
        if not left or not args:
            return None
        want = left.pop(0)
        want = layer.input_qparams.quantize(want) if args[0].dtype is torch.uint8 else want
        pairs.append((f"the input of {path}", args[0], want))
        return (want, *args[1:])

    paths = {_original(path) for path in layers}
    read = [(m, partial(record, path)) for path, m in simulated.named_modules() if path in paths]
    with watching(read, before=True):
        expected = _results(simulated, example)
    with ExitStack() as stack:
        for path, layer in layers.items():
            hook = partial(force, path)
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        results = _results(model, example)
    if len(results) != len(expected):
        none = torch.empty(0, device="cpu")
        return [*pairs, ("the number of results", none, none.new_empty(1))]
    both = enumerate(zip(results, expected, strict=True))
    return [*pairs, *((f"result {number}", got, want) for number, (got, want) in both)]


def _original(path: str) -> str:
    """Return the path of a layer in the simulation: variants of it have a longer name."""
    return path.partition("_again")[0]


def _agree(got: Tensor, want: Tensor) -> bool:
    """Return True if two tensors of values, or of codes, differ by no more than rounding."""
    if got.shape != want.shape:
        return False
    if got.dtype is torch.uint8:
        off = float((got.int() - want.int()).abs().sum())
        return off <= max(2.0, LAYER_TOLERANCE * got.numel())
    return distance(got, want) <= LAYER_TOLERANCE * norm(want)
