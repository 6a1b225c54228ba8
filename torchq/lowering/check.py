"""Comparison of a deployed model with the simulation that it was made from.

A deep network may amplify one code that falls the other way at a tie until no result agrees. Giving
every layer the inputs that it has in the simulation tells that from a wrong layer. So a result
that is near is no proof, and one that is far is no error: layers are compared.
"""

import math
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_model, tensors_in
from torchq.lowering.layer import Int8Layer
from torchq.swap.even_channels import as_in_files
from torchq.utils import RandomState, state_kept, watching
from torchq.workflow import quantizers, weight_quantizers

#: The relative error of a result from which on the user is told that the model amplifies ties.
RESULT_TOLERANCE = 0.1
#: The relative error of results that float32 explains, and some codes that are off by one: with 8
#: bits and values of 32 codes, one code in a thousand that is one off gives 1e-3.
EQUAL_RESULTS = 1e-3
#: The share of codes that may be off by one when layers are given the inputs of the simulation.
#: Measured: at most 3e-5 of the codes, and 2e-2 behind averages, whose sums lie at ties.
CODES_TOLERANCE = 0.03
#: The relative error of floating-point tensors there. One code in 50 that is one off, of values of
#: 32 codes, makes .0045. A gain of 1.01 would be .01.
VALUES_TOLERANCE = 0.005
#: Kernels add in another order: sums of a thousand products differ by this share of themselves.
_OTHER_ORDER = 3e-6
#: Few values lie that near to a tie, so one draw of the noise may turn none of a thousand.
_DRAWS = 8
#: Both in units of the distance of numbers beside 1 in the dtype that the model computes in, where
#: that is more: both round every value to it, and bfloat16 has 8 bits, as codes have.
_CODES_OF_PRECISION, _VALUES_OF_PRECISION = 32, 2


class ReferenceCheck:
    """The results of the simulation for an input, to compare the results of others with.

    The model and the input stay as they are, whatever a forward writes.

    Attributes:
        example: the input.
        what: the input in words: ``the example``.
        outcome: what the simulation returned, or returns now where it is None.
    """

    def __init__(
        self,
        simulated: nn.Module,
        example: Any,
        what: str = "the example",
        outcome: Any = None,
    ) -> None:
        self._simulated, self.example, self.what = simulated, example, what
        self._start = RandomState.now()
        self.outcome = call_once(simulated, example) if outcome is None else outcome
        self._expected = list(tensors_in(self.outcome))
        for number, expected in enumerate(self._expected):
            if bool(expected.isnan().any()):
                raise ExportError(
                    f"deploy: result {number} of the simulation is NaN for {what}; expected "
                    "numbers to compare with. torchq.layer_errors names the layer it comes from"
                )

    def __call__(self, model: nn.Module) -> tuple[str, str]:
        """Return what is wrong with a model on kernels of torch, and what is suspicious; or ""."""
        far = self.difference(model, RESULT_TOLERANCE)
        pairs = forced_pairs(model, self._simulated, self.example)
        precision = _precision_of(self._simulated)
        layer = next(
            (what for what, got, want in pairs if not _agree(got, want, precision)),
            None,
        )
        if layer is not None:
            difference = (
                f"given the inputs of the simulation, {layer} differs, for {self.what}"
            )
            return f"{far}. G{difference[1:]}" if far else difference, ""
        note = (
            f"{far}, though every layer agrees when given the same input" if far else ""
        )
        return "", note

    def difference(self, model: nn.Module, most: float = EQUAL_RESULTS) -> str:
        """Return which result of ``model`` differs by more than a relative error; "" if none."""
        results = self._results(model)
        if len(results) != len(self._expected):
            return f"the model returns {len(results)} tensors; expected {len(self._expected)}"
        for number, (expected, got) in enumerate(
            zip(self._expected, results, strict=True)
        ):
            if got.shape != expected.shape:
                shapes = f"{tuple(got.shape)}; expected {tuple(expected.shape)}"
                return f"result {number} has shape {shapes}"
            error = distance(got, expected)
            if not error <= most * norm(expected):
                return (
                    f"result {number} has relative error {_ratio(error, expected)} against the "
                    f"simulation; expected at most {most:g}"
                )
        return ""

    def unexplained(self, model: nn.Module, most: float) -> str:
        """Return which result differs by more than ties explain that fall the other way; or "".

        For models in which no layer can be compared. A deep network amplifies a value that is
        rounded the other way at a tie, so results may differ by twice as much as those of the
        simulation do among themselves, where what its quantizers read is a little off.
        """
        deviation = self.difference(model, most)
        if not deviation:
            return ""
        results = self._results(model)
        if [r.shape for r in results] != [r.shape for r in self._expected]:
            return deviation
        errors = list(map(distance, results, self._expected))
        far = [
            number
            for number, expected in enumerate(self._expected)
            if not errors[number] <= most * norm(expected)
        ]
        moved = self._moved()
        if all(errors[number] <= 2 * moved[number] for number in far):
            return ""
        return deviation

    def _moved(self) -> list[float]:
        """Return by how much each result moves where quantizers read sums of another order."""
        generator = torch.Generator().manual_seed(0)

        def add_noise(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = args
            noise = torch.randn(x.shape, generator=generator).to(x)
            return (x * (1 + _OTHER_ORDER * noise), *others)

        weights = weight_quantizers(self._simulated)
        with ExitStack() as stack:
            for quantizer in quantizers(self._simulated).values():
                if id(quantizer) not in weights:
                    handle = quantizer.register_forward_pre_hook(add_noise)
                    stack.callback(handle.remove)
            draws = [self._results(self._simulated) for _ in range(_DRAWS)]
        return [
            max(distance(results[number], expected) for results in draws)
            for number, expected in enumerate(self._expected)
        ]

    def found(self, model: nn.Module) -> str:
        """Return in a line how far the results of ``model`` agree with those of the simulation."""
        texts = []
        pairs = zip(self._results(model), self._expected, strict=True)
        for number, (got, expected) in enumerate(pairs):
            error = distance(got, expected)
            size = norm(expected)
            level = (
                f"{20 * math.log10(size / error):.1f} dB" if error and size else "equal"
            )
            texts.append(f"result {number} {level if not error or size else 'differs'}")
        shown = ", ".join(texts[:4]) + (", ..." if len(texts) > 4 else "")
        return f"{self.what}: {shown or 'no tensor'}"

    def _results(self, model: nn.Module) -> list[Tensor]:
        """Return results of another model for the same input and random numbers."""
        after = RandomState.now()
        self._start.restore()
        try:
            return list(tensors_in(call_once(model, self.example)))
        finally:
            after.restore()


def call_once(model: nn.Module, example: object) -> Any:
    """Return what a model returns for a copy of an example, from its present state.

    What a graph has opened is no state, and stays open.
    """
    state = (
        nullcontext() if getattr(model, "is_stateless", False) else state_kept(model)
    )
    with torch.no_grad(), state:
        return call_model(model, example)


def _ratio(error: float, expected: Tensor) -> str:
    size = norm(expected)
    return f"{error / size:.2g}" if size else "inf"


def norm(x: Tensor) -> float:
    """Return the norm of the finite numbers in float64."""
    return float(x.double().masked_fill(x.isinf(), 0).norm())


def distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference, in which infinity equals itself: masks are made of it."""
    return float((a.double() - b.double()).masked_fill(a == b, 0).norm())


def forced_pairs(
    model: nn.Module, simulated: nn.Module, example: Any
) -> list[tuple[str, Tensor, Tensor]]:
    """Return what each layer of a deployed model got and should get, and the same of results.

    Every integer layer reads what the layer of the same name reads in the simulation. What it would
    have read otherwise comes from such inputs too, so that errors do not add up: they belong to the
    layers just before. Inputs are compared as codes.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, Int8Layer)}
    inputs: dict[str, list[Tensor]] = {}
    pairs: list[tuple[str, Tensor, Tensor]] = []

    def record(path: str, args: tuple[Any, ...], *_: object) -> None:
        inputs.setdefault(path, []).extend(x.detach().clone() for x in args[:1])

    def force(path: str, layer: Int8Layer, args: tuple[Any, ...]) -> object:
        not_fed = inputs.get(_original(path))
        if not not_fed or not args:
            return None
        given_codes = args[0].dtype is torch.uint8
        # A simulation may have rounded already what the layer would round itself.
        got = args[0] if given_codes else layer.input_codes(args[0])
        expected_codes = [layer.input_codes(x) for x in not_fed]
        # A graph may run the calls of one layer in another order: it gets what is nearest.
        place = min(
            range(len(not_fed)),
            key=lambda number: _gap(got, expected_codes[number]),
        )
        want = expected_codes[place]
        fed = not_fed.pop(place)
        pairs.append((f"the input of {path}", got, want))
        return (want if given_codes else fed, *args[1:])

    paths = {_original(path) for path in layers}
    read = [
        (m, partial(record, path))
        for path, m in simulated.named_modules()
        if path in paths
    ]
    start = RandomState.now()
    # A deployed layer gives what is multiplied by the factors of its reader.
    with as_in_files(simulated), watching(read, before=True):
        expected = list(tensors_in(call_once(simulated, example)))
    with ExitStack() as stack:
        for path, layer in layers.items():
            hook = partial(force, path)
            stack.callback(layer.register_forward_pre_hook(hook).remove)
        start.restore()
        results = list(tensors_in(call_once(model, example)))
    if len(results) != len(expected):
        none = torch.empty(0, device="cpu")
        return [*pairs, ("the number of results", none, none.new_empty(1))]
    both = enumerate(zip(results, expected, strict=True))
    return [*pairs, *((f"result {number}", got, want) for number, (got, want) in both)]


def _gap(got: Tensor, want: Tensor) -> float:
    return distance(got, want) if got.shape == want.shape else math.inf


def _original(path: str) -> str:
    """Return the path of a layer in the simulation: variants of it have a longer name."""
    return path.partition("_again")[0]


def _precision_of(model: nn.Module) -> float:
    """Return the distance of numbers beside 1 in the coarsest dtype of parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)


def _agree(got: Tensor, want: Tensor, precision: float) -> bool:
    """Return True if two tensors of values, or of codes, differ by no more than rounding."""
    if got.shape != want.shape:
        return False
    if got.dtype is torch.uint8:
        off = (got.int() - want.int()).abs()
        share = max(CODES_TOLERANCE, _CODES_OF_PRECISION * precision)
        return float(off.sum()) <= max(2.0, share * got.numel())
    allowed = max(VALUES_TOLERANCE, _VALUES_OF_PRECISION * precision)
    return distance(got, want) <= allowed * norm(want)
