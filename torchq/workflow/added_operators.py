"""Which operators beside layers stay in float: those whose quantizers cost too much at the outputs.

Quantizers that a target adds beside layers buy time, never accuracy. What one of them costs is a
question about the outputs of the model, which its own error does not answer: the sum of squares of
a spectrogram is right to 30 dB and leaves 4 dB at the end. Runs with one operator on at a time do
not answer it either, as what differs there is mostly what the noise of the layers does.

The estimate: each operator returns what it gives in float, and its error e is kept. For a random
direction v of the outputs one backward pass gives the derivative of (v . outputs) along every e,
and the mean of its squares over directions is the noise that this operator adds to the outputs.
Where a model has no gradients, groups of operators run quantized, and the worst group is halved.

Nothing is believed: an estimate whose sum is far below what all operators do together in a run is
dropped for the groups, and a choice is kept where it brings the outputs nearer to those in float.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import TorchqError
from torchq.graph import (
    Forward,
    call_arguments,
    floats_in,
    map_tensors,
    move_to,
    results_in,
    tensors_in,
    with_copies,
)
from torchq.nn import Tap, TensorQuantizer, switched_off
from torchq.nn.convert import unchanged_on_error
from torchq.nn.integer_kernel import kernels_off
from torchq.runtime import runtime_with
from torchq.swap.apply import keep_as_plan, plan_of
from torchq.swap.optional import Replanning, optional_operators, replan_
from torchq.swap.plan import Plan
from torchq.utils import (
    RandomState,
    device_of,
    evaluating,
    listed,
    state_kept,
    watching,
)
from torchq.workflow.modes import quantizers
from torchq.workflow.runs import (
    Comparison,
    NoiseSums,
    Runs,
    without_padding,
)
from torchq.workflow.two_versions import (
    computing_alone_in_float,
    float_call,
    forward_replaced,
)

#: Samples that operators are ranked on, and of how many batches. With two of them a ResNet-20 had
#: additions in float that cost nothing, and a network for kinds of files one on integers that
#: ruined it.
_SAMPLES = 8
_BATCHES = 4
#: Of how many samples of a batch one is compared, so that this stays a part of the calibration.
_EIGHTH = 8
#: Samples that are compared at least, if there are so many.
_FEWEST = 32
#: The same where so few do not tell, as their noise differs too much.
_MORE = 128
#: Samples of several batches that run together at most.
_TOGETHER = 16
#: Random directions of the outputs: more did not rank better on a network of 58 operators.
_DIRECTIONS = 3
#: By how much operators that stay quantized may raise the root of the noise over the signal, which
#: the answers that change are in proportion to: less than half a percent of them.
_OF_ANSWERS = 0.004
#: The noise over the signal that no answer notices: 40 dB.
UNNOTICED = 1e-4
#: How far a run may be above the sum of estimates before they are not believed.
_UNEXPLAINED = 4.0
#: Runs for models without gradients.
_RUNS = 12
_SEED = 0
#: By how many dB the outputs must be nearer to float for operators to stay there: half the noise.
#: The layers whose results they read leave the integer kernels with them, which takes time, and
#: makes the outputs depend on the order in which a library adds. On ResNets 2 dB are not rare.
_LEAST_GAIN = 3.0
#: The gain that estimates must promise for it to be looked at in runs. They are means of two dozen
#: squares, of which a third may be missing, so that they promise 2 dB where 3 dB come true.
_LEAST_EXPECTED = 2.0
#: By how many standard errors of the gain it must be above that.
_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class OperatorChoice:
    """What calibration found out about the operators that a target added beside layers.

    Attributes:
        noise: path of each of them -> the noise that it alone adds to the outputs of the model,
            over their power.
        layers: the noise of the layers, with all of them in float.
        by: "gradients", or "groups" where the model has none.
        left_float: paths of those that stay in float, the worst first, then those that follow.
        advised: paths of those that would, where nothing is changed as the model is to be trained.
        outputs: the outputs with all of them quantized, and with these in float.
        together: the noise that all of them add at once, as a run shows it.
    """

    noise: Mapping[str, float] = field(default_factory=dict)
    layers: float = 0.0
    by: str = ""
    left_float: tuple[str, ...] = ()
    advised: tuple[str, ...] = ()
    outputs: Comparison = field(default_factory=Comparison)
    together: float = 0.0

    @property
    def gain(self) -> float:
        """How much nearer to float the outputs are with them in float, in dB."""
        return self.outputs.gain

    def expected_gain(self, in_float: Iterable[str]) -> float:
        """Return how much nearer to float the outputs will be with some in float, in dB."""
        total = sum(self.noise.values())
        rest = total - sum(self.noise[name] for name in in_float)
        # Where a run shows more noise than the estimates together, each may be as much too small.
        scale = max(1.0, self.together / total) if total else 1.0
        before, after = (self.layers + scale * noise for noise in (total, rest))
        return 10 * math.log10(before / after) if after > 0 else math.inf

    @property
    def line(self) -> str:
        """Say in one line what stays in float, and why; "" where nothing does."""
        if self.advised:
            return (
                f"{len(self.advised)} of {len(self.noise)} operators beside layers cost much at "
                f"the output ({listed(self.advised)}), which training heals"
            )
        if not self.left_float:
            return ""
        stay = "stays" if len(self.left_float) == 1 else "stay"
        it = "it costs" if len(self.left_float) == 1 else "they cost"
        return (
            f"{len(self.left_float)} of {len(self.noise)} operators {stay} float: {it} "
            f"{self.gain:.1f} dB at the output ({self.outputs}); "
            f"torchq.swap.plan_of(model).explain({self.left_float[0]!r})"
        )

    def note(self, name: str) -> str:
        """Return the numbers about one operator that is left in float."""
        if name not in self.noise:
            return "what reads its result is left in float, and the target cannot run it then"
        return (
            f"quantized, it adds noise {decibels(self.noise[name])} the output, the layers noise "
            f"{decibels(self.layers)} it"
        )


def decibels(share: float) -> str:
    """Return how far noise is below what it is a share of."""
    if share <= 0:
        return "nowhere near"
    level = 10 * math.log10(share)
    return f"{abs(level):.1f} dB {'above' if level > 0 else 'below'}"


@dataclass(frozen=True)
class Sample:
    """A part of a batch as the arguments of one call of a model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        count: the samples in it; None where no dimension of all tensors counts them.
        exact: what the float model returns for it.
        batches: of how many batches it holds a part.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    count: int | None
    exact: Sequence[Tensor] = ()
    batches: int = 1

    def call(self, model: nn.Module) -> list[Tensor]:
        """Run a model on a copy of it, simulated; return the floating-point results.

        Simulated, as no layer may round its result for a quantizer that is off.
        """
        return results_of(model, [self])[0]

    def with_results(self, model: nn.Module) -> Sample:
        """Return this with what the float model gives for it, if it is not known yet."""
        if self.exact:
            return self
        with switched_off(quantizers(model).values()):
            return replace(self, exact=self.call(model))


def results_of(model: nn.Module, samples: Iterable[Sample]) -> list[list[Tensor]]:
    """Return what :meth:`Sample.call` does of several samples, each from the same state."""
    start = RandomState.now()
    results_of_all = []
    with state_kept(model) as restore, kernels_off(model):
        for number, sample in enumerate(samples):
            if number:
                restore()
            args, kwargs = with_copies((sample.args, dict(sample.kwargs)))
            results = results_in(model(*args, **kwargs))
            kept = without_padding(model, sample.args, sample.kwargs, results)
            results_of_all.append(kept)
            start.restore()
    return results_of_all


def compared(
    model: nn.Module,
    samples: Sequence[Sample],
    before: Sequence[Sequence[Tensor]],
    after: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup | None,
) -> Comparison:
    """Return what two versions of a model give for samples, beside the results in float."""
    sums = NoiseSums()
    for sample, old, new in zip(samples, before, after, strict=True):
        sums.add(sample.exact, old, new, sample.batches)
    return sums.comparison(group, device_of(model))


class _NotCalled(Exception):
    """The function that is called in place of the model does not call it as a whole."""


def arguments_of(runs: Runs, batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the model's call for a batch, as its last call has them."""
    device = device_of(runs.model)
    if runs.forward is None:
        moved = batch if device is None else move_to(batch, device)
        return call_arguments(runs.model, moved)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def see(args: object, kwargs: object, _: object) -> None:
        calls.append(with_copies((args, kwargs)))

    off = quantizers(runs.model).values()
    with switched_off(off), watching([(runs.model, see)], before=True):
        runs.call(batch)
    if not calls:
        raise _NotCalled
    return calls[-1]


def as_example(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> Any:
    """Return the arguments of a call as what functions take for an example."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


class FewSamples:
    """A few samples of the batches of a calibration, and what the model gives for them.

    Operators are ranked on some of the first batches, and changes of the model are compared on some
    of every batch. Where all batches hold no more than the first, both are the same, and what one
    has run is not run again.

    Args:
        runs: a calibrated model, in eval mode, and its batches.
        count: how many batches calibration read.
    """

    def __init__(self, runs: Runs, count: int) -> None:
        self._runs = runs
        self._count = count
        self._of_first: list[Sample] | None = None
        self._of_all: list[Sample] | None = None
        self._results: list[list[Tensor]] | None = None
        self._results_of_first: list[list[Tensor]] | None = None

    def of_first(self) -> list[Sample]:
        """Return those that operators are ranked on."""
        if self._of_first is None:
            self._of_first, are_all = _some_samples(self._runs, self._count)
            if are_all:
                self._of_all = self._of_first
        return self._of_first

    def first_are_all(self) -> bool:
        """Return True where operators are ranked on all that changes are compared on."""
        return self.of_first() is self._of_all

    def of_all(self) -> list[Sample]:
        """Return a few of every batch."""
        if self._of_all is None:
            self._of_all = samples_of_all(self._runs, self._count)
        return self._of_all

    def more_of_all(self) -> list[Sample]:
        """Return more of every batch."""
        return samples_of_all(self._runs, self._count, _MORE)

    def results(self) -> list[list[Tensor]]:
        """Return what the model gives for a few of every batch, as it is since `forget_results`."""
        if self._results is None:
            self._results = results_of(self._runs.model, self.of_all())
        return self._results

    def results_of_first(self) -> list[list[Tensor]]:
        """Return what the model gives for those that operators are ranked on."""
        if self.first_are_all():
            return self.results()
        if self._results_of_first is None:
            self._results_of_first = results_of(self._runs.model, self.of_first())
        return self._results_of_first

    def forget_results(self) -> None:
        """Run the model again for the next results, as it has changed."""
        self._results = None
        self._results_of_first = None


def _some_samples(runs: Runs, count: int) -> tuple[list[Sample], bool]:
    """Return the few samples that operators are ranked on, of the first batches.

    The second is True where they are all that :func:`samples_of_all` would return.
    """
    wholes: list[Sample] = []
    parts: list[Sample] = []

    def step(number: int, batch: object) -> None:
        # A run of two samples takes little longer than one of a single sample.
        wanted = min(count, _BATCHES, -(-_SAMPLES // min(2, max(1, _size(batch)))))
        if number < wanted and all(whole.count for whole in wholes):
            with suppress(_NotCalled):
                wholes.append(_whole(runs, batch))
                parts.append(_part(wholes[-1], -(-_SAMPLES // wanted)))

    runs.again(step, min(count, _BATCHES))
    if all(part is whole for part, whole in zip(parts, wholes, strict=True)):
        # A function of the user's takes whole runs, so samples_of_all calls it for some batches.
        are_all = len(wholes) == count and runs.forward is None
        return _together(runs.model, parts), are_all
    try:
        return _together(runs.model, parts), False
    except Exception:  # whatever a model raises that takes batches of one size alone
        return [replace(wholes[0], count=None).with_results(runs.model)], False


def samples_of_all(runs: Runs, count: int, fewest: int = _FEWEST) -> list[Sample]:
    """Return a few samples of each batch; of some alone, where that needs a whole run for each."""
    samples: list[Sample] = []

    def step(number: int, batch: object) -> None:
        is_dear = runs.forward is not None or any(s.count is None for s in samples)
        if not (is_dear and number % _EIGHTH):
            few = max(-(-fewest // count), min(_EIGHTH, _size(batch) // _EIGHTH))
            with suppress(_NotCalled):
                samples.append(_sample(runs, batch, few, taken))

    taken: set[_Form] = set()
    runs.again(step, count)
    return _together(runs.model, samples)


def _size(batch: object) -> int:
    """Return how many samples a batch seems to have."""
    first = next((t for t in tensors_in(batch) if t.dim()), None)
    return 1 if first is None else first.shape[0]


#: The shapes and types of the tensors of a call.
_Form = tuple[tuple[torch.Size, torch.dtype], ...]


def _sample(runs: Runs, batch: object, most: int, taken: set[_Form]) -> Sample:
    """Return the first samples of a batch, if all tensors of the call count the same number.

    ``taken`` gets the form of what the model took. What has such a form is not run here: several
    samples run together later, which takes about as long as one.
    """
    whole = _whole(runs, batch)
    few = _part(whole, most)
    form = tuple((t.shape, t.dtype) for t in tensors_in((few.args, few.kwargs)))
    if few is whole or form in taken:
        return few
    try:
        with_results = few.with_results(runs.model)
        taken.add(form)
        return with_results
    except Exception:  # whatever a model raises that takes batches of one size alone
        return replace(whole, count=None)


def _whole(runs: Runs, batch: object) -> Sample:
    """Return a batch, with its size if all tensors of the call count the same number."""
    args, kwargs = arguments_of(runs, batch)
    sizes = {t.shape[0] if t.dim() else None for t in tensors_in((args, kwargs))}
    return Sample(args, kwargs, sizes.pop() if len(sizes) == 1 else None)


def _part(whole: Sample, most: int) -> Sample:
    """Return the first samples of a batch; the batch where it has no more, or cannot be cut."""
    if whole.count is None or whole.count <= most:
        return whole
    given = (whole.args, whole.kwargs)
    args, kwargs = map_tensors(given, lambda tensor: tensor[:most])
    return Sample(args, kwargs, most)


def _together(model: nn.Module, samples: Sequence[Sample]) -> list[Sample]:
    """Return samples of several batches as few that a model takes, with its results in float.

    Where it computes with a handful of samples, a run takes about as long as with a single one.
    """
    joined: list[Sample] = []
    for sample in samples:
        if joined and _may_join(joined[-1], sample):
            joined[-1] = _joined(joined[-1], sample)
        else:
            joined.append(sample)
    if len(joined) < len(samples):
        try:
            return [sample.with_results(model) for sample in joined]
        # Whatever a model raises that takes batches of one size alone.
        except Exception:
            joined = list(samples)
    return [sample.with_results(model) for sample in joined]


def _may_join(one: Sample, other: Sample) -> bool:
    """Return True for few samples that differ in nothing but the numbers of their tensors."""
    if one.count is None or other.count is None or one.kwargs or other.kwargs:
        return False
    pairs = list(zip(one.args, other.args, strict=False))
    are_alike = len(one.args) == len(other.args) and all(
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and (x.shape[1:], x.dtype) == (y.shape[1:], y.dtype)
        for x, y in pairs
    )
    return are_alike and one.count + other.count <= _TOGETHER


def _joined(one: Sample, other: Sample) -> Sample:
    pairs = zip(one.args, other.args, strict=True)
    args = tuple(torch.cat(pair) for pair in pairs)
    assert one.count is not None and other.count is not None
    batches = one.batches + other.batches
    return Sample(args, {}, one.count + other.count, batches=batches)


def _noise(samples: Sequence[Sample], results: Sequence[Sequence[Tensor]]) -> float:
    """Return the mean share of noise in results of a model, beside those in float.

    NaN where nothing can be compared, infinite where a result is NaN.
    """
    sums = NoiseSums()
    for sample, result in zip(samples, results, strict=True):
        sums.add(sample.exact, sample.exact, result)
    after = sums.comparison(None, None).after
    return math.nan if after is None else after


class _NoGradients(Exception):
    """No gradient of the outputs reaches the operators."""


class _Errors:
    """Runs operators in float, and measures along their errors where gradients come by."""

    def __init__(self, operators: Mapping[str, nn.Module], count: int | None) -> None:
        self._operators = operators
        self._count = count
        #: Path -> the derivatives of the current direction along its errors, one for each sample.
        self._slopes: dict[str, Tensor] = {}
        self.noise = dict.fromkeys(operators, 0.0)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the operators return what they give in float, inside the ``with`` block."""
        with ExitStack() as stack:
            for name, module in self._operators.items():
                forward = partial(self._call, name, module, module.forward)
                stack.enter_context(forward_replaced(module, forward))
            yield

    def _call(
        self,
        name: str,
        module: nn.Module,
        forward: Any,
        *args: object,
        **kwargs: object,
    ) -> object:
        with torch.no_grad():
            quantized = floats_in(forward(*args, **kwargs))
        exact = float_call(module, forward, args, kwargs)
        errors = iter(quantized)

        def watched(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            error = next(errors) - tensor.detach()
            if not tensor.requires_grad:
                # Gradients begin at the first operator. The copy is no leaf, so that an operator
                # behind it may still work in place.
                tensor = tensor.detach().requires_grad_().clone()
            tensor.register_hook(partial(self._add, name, error))
            return tensor

        return map_tensors(exact, watched)

    def _add(self, name: str, error: Tensor, gradient: Tensor) -> None:
        products = gradient.double() * error.double()
        count = self._count or 1
        # Samples do not touch each other, so each is a draw of its own.
        is_by_sample = products.dim() > 0 and products.shape[0] % count == 0
        slopes = products.reshape(count if is_by_sample else 1, -1).sum(1)
        before = self._slopes.get(name)
        if before is not None and before.shape == slopes.shape:
            slopes = before + slopes
        self._slopes[name] = slopes

    def end_direction(self) -> None:
        """Add the squares of a direction."""
        for name, slopes in self._slopes.items():
            self.noise[name] += float(slopes.square().sum()) / _DIRECTIONS
        self._slopes.clear()


@contextmanager
def _without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _by_gradients(
    model: nn.Module, operators: Mapping[str, nn.Module], samples: Sequence[Sample]
) -> tuple[dict[str, float], float]:
    """Return the noise that each operator alone adds, and that with all of them in float."""
    noise = dict.fromkeys(operators, 0.0)
    generator = torch.Generator().manual_seed(_SEED)
    powers = _powers(samples)
    outputs = []
    for sample in samples:
        errors = _Errors(operators, sample.count)
        with _without_parameter_gradients(model):
            with torch.enable_grad(), errors.watched():
                results = sample.call(model)
            weighted = [
                (result, weight)
                for result, weight in zip(results, powers, strict=False)
                if result.requires_grad and weight > 0
            ]
            if not weighted:
                raise _NoGradients
            for _ in range(_DIRECTIONS):
                directions = [
                    torch.randn(result.shape, generator=generator).to(result) * weight
                    for result, weight in weighted
                ]
                tensors = [result for result, _ in weighted]
                torch.autograd.backward(tensors, directions, retain_graph=True)
                errors.end_direction()
        for name, share in errors.noise.items():
            noise[name] += share
        outputs.append([result.detach() for result in results])
    if not all(map(math.isfinite, noise.values())):
        raise _NoGradients
    return noise, _noise(samples, outputs)


def _powers(samples: Sequence[Sample]) -> list[float]:
    """Return for each result the factor that makes its noise a share of the signal in samples.

    Shares of several results are averaged, as :class:`torchq.workflow.runs.NoiseSums` does.
    """
    powers: list[float] = []
    for sample in samples:
        for number, result in enumerate(sample.exact):
            finite = result[result.isfinite()].double()
            if number == len(powers):
                powers.append(0.0)
            powers[number] += float(finite.square().sum())
    with_signal = sum(power > 0 for power in powers)
    return [(with_signal * power) ** -0.5 if power > 0 else 0.0 for power in powers]


def _run_with(
    model: nn.Module, sample: Sample, in_float: Iterable[nn.Module]
) -> list[Tensor]:
    """Run a quantized model with some operators in float."""
    with computing_alone_in_float(in_float):
        return sample.call(model)


#: Noise at the outputs with some operators quantized, the others in float.
Measure = Callable[[Iterable[str]], float]


@dataclass
class _Group:
    """Some operators, with the noise that they add when they alone are quantized.

    Attributes:
        names: in the order in which they run.
        noise: as a run showed, or a bound.
        is_measured: no run is needed to know it better.
    """

    names: tuple[str, ...]
    noise: float
    is_measured: bool = True


def _by_groups(
    names: Sequence[str], measure: Measure, runs: int
) -> tuple[dict[str, float], float]:
    """Return the noise that operators add, as groups show it, and that of the layers.

    The worst group is halved, until it is one operator or nothing bad is left.

    Args:
        names: of the operators, in the order in which they run.
        measure: returns the noise at the outputs with some operators quantized.
        runs: how often it may be called.
    """
    layers = measure(())

    def measured(chosen: tuple[str, ...]) -> float:
        return max(0.0, measure(chosen) - layers)

    groups = [_Group(tuple(names), measured(tuple(names)))]
    for _ in range(runs - 2):
        groups.sort(key=lambda group: group.noise)
        if sum(group.noise for group in groups) <= _allowed(layers):
            break
        halved = [g for g in groups if len(g.names) > 1 or not g.is_measured]
        if not halved:
            break
        worst = halved[-1]
        if not worst.is_measured:
            worst.noise = measured(worst.names)
            worst.is_measured = True
            continue
        middle = len(worst.names) // 2
        first = _Group(worst.names[:middle], measured(worst.names[:middle]))
        # Small errors add up. Where one half alone does all the damage, the other may do it too.
        is_small = first.noise <= worst.noise / 2
        rest = worst.noise - first.noise if is_small else worst.noise
        groups.remove(worst)
        groups += [first, _Group(worst.names[middle:], rest, is_small)]
    noise_by_name: dict[str, float] = {}
    for group in groups:
        share = group.noise / len(group.names)
        noise_by_name |= dict.fromkeys(group.names, share)
    return {name: noise_by_name[name] for name in names}, layers


class _Joined:
    """Numbers that all ranks decide by: means over the ranks that have a batch."""

    def __init__(self, runs: Runs, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._device = device_of(runs.model)

    def mean(self, numbers: Sequence[float] | None, length: int) -> list[float]:
        """Return the mean of some numbers; None stands for a rank without any."""
        values = [0.0] * length if numbers is None else list(numbers)
        if self._group is None:
            return values
        data = [*values, float(numbers is not None)]
        sums = torch.tensor(data, dtype=torch.float64, device=self._device)
        dist.all_reduce(sums, group=self._group)
        return (sums[:-1] / sums[-1].clamp_min(1)).tolist()


def rank_operators(
    runs: Runs,
    names: Sequence[str],
    few: FewSamples,
    group: dist.ProcessGroup | None = None,
) -> OperatorChoice:
    """Estimate what each of some operators adds to the noise at the outputs of a model.

    Args:
        runs: a calibrated model, in eval mode.
        names: the paths of the operators.
        few: samples of its batches; none on a rank without a batch.
        group: processes that get the same numbers, means over their samples.

    Returns:
        A choice that leaves nothing in float yet; without numbers where the outputs cannot be
        compared.
    """
    model = runs.model
    operators = {name: model.get_submodule(name) for name in names}
    joined = _Joined(runs, group)
    samples = few.of_first()

    def measure(quantized: Iterable[str]) -> float:
        in_float = [m for name, m in operators.items() if name not in set(quantized)]
        noise = None
        if samples:
            outputs = [_run_with(model, sample, in_float) for sample in samples]
            noise = [_noise(samples, outputs)]
        return joined.mean(noise, 1)[0]

    estimates = None
    if samples:
        try:
            by_name, of_layers = _by_gradients(model, operators, samples)
            whole = _noise(samples, few.results_of_first())
            estimates = [*by_name.values(), of_layers, whole]
        except (_NoGradients, RuntimeError, TorchqError, TypeError, AttributeError):
            # Infinity makes every rank take the other way.
            estimates = [math.inf] * (len(names) + 2)
    *noise, layers, whole = joined.mean(estimates, len(names) + 2)
    if math.isnan(layers) or not joined.mean([float(bool(samples))], 1)[0]:
        return OperatorChoice()
    is_known = math.isfinite(sum(noise)) and math.isfinite(layers)
    explained = _UNEXPLAINED * sum(noise) + _allowed(layers)
    if is_known and whole - layers <= explained:
        by_name = dict(zip(names, noise, strict=True))
        added = max(0.0, whole - layers)
        return OperatorChoice(by_name, layers, "gradients", together=added)
    shown, layers = _by_groups(names, measure, _RUNS)
    if not all(map(math.isfinite, (layers, *shown.values()))):
        return OperatorChoice()
    return OperatorChoice(shown, layers, "groups")


def _allowed(layers: float) -> float:
    """Return the noise that the operators that stay quantized may add to that of the layers."""
    return (math.sqrt(layers) + _OF_ANSWERS) ** 2 - layers


def worst_operators(ranked: OperatorChoice) -> tuple[str, ...]:
    """Return the fewest operators, the worst first, without which the rest is far below layers."""
    rest = sum(ranked.noise.values())
    if ranked.layers + rest <= UNNOTICED:
        return ()
    worst = []
    for name in sorted(ranked.noise, key=lambda name: -ranked.noise[name]):
        if rest <= _allowed(ranked.layers):
            break
        worst.append(name)
        rest -= ranked.noise[name]
    return tuple(worst)


# --- carrying it out ------------------------------------------------------------------------------


class _Dropped(Exception):
    """The outputs are no nearer to those in float, so the operators stay quantized."""


def choose_operators_(
    runs: Runs,
    few: FewSamples,
    group: dist.ProcessGroup | None = None,
) -> OperatorChoice:
    """Leave the operators in float that cost too much at the outputs, in place.

    Args:
        runs: a calibrated model, in eval mode, and its batches.
        few: samples of them.
        group: processes that decide together.

    Returns:
        What was found out, with the outputs before and after it.
    """
    model = runs.model
    plan = plan_of(model)
    runtime = runtime_with(plan.target, plan.settings)
    names = _names(model, plan)
    if runtime is None or not names:
        return OperatorChoice()
    choice = rank_operators(runs, names, few, group)
    worst = worst_operators(choice)
    if worst and choice.expected_gain(worst) >= _LEAST_EXPECTED:
        choice = _tried(runs, few, choice, worst, group)
    if not choice.left_float:
        # What stays quantized is not open any more.
        keep_as_plan(model, _with_noise(plan, choice))
    return choice


def costly_operators(
    model: nn.Module, batches: Iterable[object], forward: Forward | None, count: int
) -> OperatorChoice:
    """Return what calibration would find out about operators, for a model that is trained.

    Args:
        model: calibrated; left unchanged.
        batches: the first few are read.
        forward: as for :func:`torchq.calibrate`.
        count: how many batches calibration read.
    """
    names = _names(model, plan_of(model))
    if not names:
        return OperatorChoice()
    with evaluating(model), torch.no_grad():
        runs = Runs(model, batches, forward)
        ranked = rank_operators(runs, names, FewSamples(runs, count))
    return replace(ranked, advised=worst_operators(ranked))


def _names(model: nn.Module, plan: Plan) -> list[str]:
    """Return the paths of the operators that calibration may leave in float."""
    return [d.name for d in optional_operators(plan) if _may_cost(model, d.name)]


def _may_cost(model: nn.Module, name: str) -> bool:
    """Return True if a quantizer of an operator is on that does not only move codes.

    What maximum pooling chooses of codes are codes of the reader's own quantizer, which is the
    same: without the first one the second gives the same numbers.
    """
    module = model.get_submodule(name)
    inner = [q for q in module.modules() if isinstance(q, TensorQuantizer)]
    moves_codes = isinstance(module, (Tap, *_MAX_POOLS)) and all(
        q.shared for q in inner
    )
    return any(q.quantizing for q in inner) and not moves_codes


_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


def _with_noise(plan: Plan, choice: OperatorChoice) -> Plan:
    """Return the plan with the numbers of a choice."""
    rows = []
    for d in plan.decisions:
        if not d.reason and d.name in choice.noise:
            d = replace(d, noise=choice.noise[d.name])
        if d.left_float:
            d = replace(d, note=choice.note(d.name))
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def _replanned(
    model: nn.Module,
    plan: Plan,
    names: Sequence[str],
    samples: Sequence[Sample],
    group: dist.ProcessGroup | None,
) -> Plan:
    """Return the plan with some operators in float, on all ranks that of the first with a batch."""
    planned: Plan | None = None
    if samples:
        runtime = runtime_with(plan.target, plan.settings)
        assert runtime is not None
        example = as_example(model, samples[0].args, samples[0].kwargs)
        planned = Replanning.of(model, plan, runtime, example).without(names)
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        own = None if planned is None else planned.to_dict()
        dist.all_gather_object(gathered, own, group=group)
        first = next(entry for entry in gathered if entry is not None)
        return Plan.from_dict(first)
    assert planned is not None
    return planned


def _tried(
    runs: Runs,
    few: FewSamples,
    ranked: OperatorChoice,
    worst: Sequence[str],
    group: dist.ProcessGroup | None,
) -> OperatorChoice:
    """Leave operators in float if the outputs are nearer to those in float then.

    A plan takes as long as some runs, so runs with these operators alone in float come first, and
    one is made where these bring the outputs nearer.
    """
    model = runs.model
    samples = few.of_all()
    before = few.results()
    operators = [model.get_submodule(name) for name in worst]
    with computing_alone_in_float(operators):
        after = results_of(model, samples)
    outputs = compared(model, samples, before, after, group)
    if not outputs.gain >= _LEAST_GAIN:
        return replace(ranked, outputs=outputs)
    if not _is_clear(model, samples, (before, after), group, outputs):
        # Where samples differ a hundredfold, the noise of a few of them is that of one.
        samples = few.more_of_all()
        before = results_of(model, samples)
    plan = _replanned(model, plan_of(model), worst, few.of_first(), group)
    others = [d.name for d in plan.replaced if d.left_float and d.name not in worst]
    choice = replace(ranked, left_float=(*worst, *others))
    try:
        with unchanged_on_error(model):
            replan_(model, _with_noise(plan, choice))
            after = results_of(model, samples)
            outputs = compared(model, samples, before, after, group)
            choice = replace(choice, outputs=outputs)
            if not _is_clear(model, samples, (before, after), group, outputs):
                raise _Dropped
    except _Dropped:
        return replace(ranked, outputs=choice.outputs)
    few.forget_results()
    return choice


def _is_clear(
    model: nn.Module,
    samples: Sequence[Sample],
    results: tuple[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]],
    group: dist.ProcessGroup | None,
    outputs: Comparison,
) -> bool:
    """Return True if a gain is large enough beyond what samples differ by."""
    error = error_of_gain(model, samples, results, group) or 0.0
    return outputs.gain - _STANDARD_ERRORS * error >= _LEAST_GAIN


def error_of_gain(
    model: nn.Module,
    samples: Sequence[Sample],
    results: tuple[Sequence[Sequence[Tensor]], Sequence[Sequence[Tensor]]],
    group: dist.ProcessGroup | None,
) -> float | None:
    """Return the standard error of a gain at the outputs, in dB, as samples differ.

    None stands for one that is not known: of a single sample, or without any noise.

    The gain is ``10 log10(sum of b / sum of a)`` over the noise b without and a with a change in
    each sample. Small changes of both sums add up, so its variance is that of a sum over samples
    of ``b / sum of b - a / sum of a``.
    """
    device = device_of(model)
    noise = torch.zeros(2, 0, dtype=torch.float64)
    powers = _powers(samples)
    for sample, old, new in zip(samples, *results, strict=True):
        rows = torch.stack([_noise_by_sample(sample, r, powers) for r in (old, new)])
        noise = torch.cat([noise, rows], 1)
    count, *totals = _summed([noise.shape[1], *noise.sum(1).tolist()], group, device)
    if count < 2 or not all(0 < total < math.inf for total in totals):
        return None
    before, after = noise / torch.tensor(totals, dtype=torch.float64)[:, None]
    (squares,) = _summed([float((before - after).square().sum())], group, device)
    return 10 / math.log(10) * math.sqrt(squares * count / (count - 1))


def _noise_by_sample(
    sample: Sample, results: Sequence[Tensor], powers: Sequence[float]
) -> Tensor:
    """Return the noise in each of several samples, in float64; as one where nothing counts them."""
    lengths = {len(result) if result.dim() else 1 for result in sample.exact}
    count = lengths.pop() if len(lengths) == 1 else 1
    noise = torch.zeros(count, dtype=torch.float64)
    for exact, result, power in zip(sample.exact, results, powers, strict=False):
        if exact.shape == result.shape and exact.numel():
            errors = (result.double() - exact.double()) * power
            errors = errors.where(exact.isfinite(), 0)
            noise += errors.reshape(count, -1).square().sum(1).cpu()
    return noise


def _summed(
    numbers: Sequence[float],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> list[float]:
    """Return numbers, each added over the ranks of a group."""
    if group is None:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    return sums.tolist()


def take_back_operators_(runs: Runs) -> bool:
    """Quantize the operators again that an earlier calibration left in float, in place.

    Returns:
        True if there were any.
    """
    model = runs.model
    plan = plan_of(model)
    runtime = runtime_with(plan.target, plan.settings)
    if runtime is None or not any(d.left_float for d in plan.replaced):
        return False

    def step(number: int, batch: object) -> None:
        example = as_example(model, *arguments_of(runs, batch))
        planned.append(Replanning.of(model, plan, runtime, example).without(()))

    planned: list[Plan] = []
    runs.again(step, 1)
    for one in planned:
        with unchanged_on_error(model):
            replan_(model, one)
    return bool(planned)
