"""Finding the ranges: feed batches through a model and set every amax."""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq import utils
from torchq.calib import methods, sync
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.correction import forget_corrections
from torchq.nn.integer_kernel import evaluation_of
from torchq.swap.apply import recorded_plans
from torchq.workflow.added_operators import (
    FewSamples,
    OperatorChoice,
    choose_operators_,
    take_back_operators_,
)
from torchq.workflow.averaged_ranges import RangeChoice, SampleEnds, choose_ranges_
from torchq.workflow.correction import NOT_READ, Correction, needs_gains
from torchq.workflow.correction import correct as correct_results
from torchq.workflow.even_channels import (
    DepthwiseInputs,
    EvenChoice,
    choose_even_channels_,
    depthwise_layers,
)
from torchq.workflow.input_factors import take_back_factors_
from torchq.workflow.linear_factors import (
    LinearFactorChoice,
    LinearInputs,
    choose_factors_,
    linear_layers,
)
from torchq.workflow.modes import quantizers, weight_quantizers
from torchq.workflow.nearly_equal_ranges import Concatenations, make_equal_
from torchq.workflow.output_search import OutputSamples, set_range_by_output
from torchq.workflow.runs import Fingerprint, Outputs, Runs

log = logging.getLogger(__name__)

OnUnseen = Literal["error", "disable", "dynamic"]

# The calibration method of weights that looks at the output of the layer.
_BY_OUTPUT = "activation"
# A loader with more batches than this is offered a bound in the progress bar.
_MANY = 64
_READ_ONCE = (
    "got batches that can be read only once; expected a list or a loader, which the correction of "
    "results reads again. Pass one, or correct=False"
)
#: A table of more rows is no screen; then so many of the widest ranges are shown.
_SCREEN = 30
_SHOWN = 5
_ALL = " (all batches; num_batches=N stops earlier)"


@dataclass(frozen=True)
class CalibrationReport:
    """What one call of :func:`calibrate` did.

    Attributes:
        batches: batches that ran through the model.
        ranges: path of each quantizer that got a range -> its smallest and its largest amax, or the
            ends of an asymmetric range.
        kept: paths of the quantizers that kept a range they had before.
        unseen: paths of the quantizers that no batch reached.
        signs: path of each quantizer that chose the sign of its codes (``unsigned="auto"``) ->
            ``"unsigned"`` or ``"signed"``.
        correction: of which layers the results are corrected; None for none.
        evaluation: what a forward in eval mode, without gradients, computes: the codes of the
            model's target, or a simulation; "" where it has none whose formulas are known.
        operators: which operators beside layers stay in float, as their quantizers cost too much at
            the outputs of the model.
        factors: which linear layers divide the channels that they read by factors.
        averages: which ranges are averaged over samples.
        even: which depthwise layers multiply the channels that they read by factors.
    """

    batches: int
    ranges: Mapping[str, tuple[float, float]]
    kept: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    signs: Mapping[str, str] = field(default_factory=dict)
    correction: Correction | None = None
    evaluation: str = ""
    operators: OperatorChoice = field(default_factory=OperatorChoice)
    factors: LinearFactorChoice = field(default_factory=LinearFactorChoice)
    averages: RangeChoice = field(default_factory=RangeChoice)
    even: EvenChoice = field(default_factory=EvenChoice)

    def table(self) -> str:
        """Return a row for every quantizer, and how many there are."""
        rows = [(name, self._range_text(name)) for name in self.ranges]
        rows += [(name, "no data reached it") for name in self.unseen]
        return utils.table([("quantizer", "amax"), *rows], self.verdict())

    def __str__(self) -> str:
        """Return how many ranges there are, and what stands out; a short :meth:`table` whole."""
        if len(self.ranges) + len(self.unseen) <= _SCREEN:
            return self.table()
        lines = [self.verdict()]
        if self.unseen:
            lines.append(f"no data reached {utils.listed(self.unseen)}")
        widest = sorted(self._activations(), key=self._width, reverse=True)[:_SHOWN]
        lines += [
            "the widest ranges:",
            *(f"  {n}  {self._range_text(n)}" for n in widest),
        ]
        if self.empty:
            lines.append(f"nothing but zeros reached {utils.listed(self.empty)}")
        lines.append("each range: report.table(); next: torchq.doctor(model, batches)")
        return "\n".join(utils.wrap(line, indent="  ") for line in lines)

    @property
    def empty(self) -> tuple[str, ...]:
        """Paths of the quantizers beside those of weights that nothing but zeros reached."""
        return tuple(name for name in self._activations() if self._width(name) == 0)

    def _activations(self) -> list[str]:
        return [name for name in self.ranges if not name.endswith("weight_quantizer")]

    def _width(self, name: str) -> float:
        return max(map(abs, self.ranges[name]))

    def _range_text(self, name: str) -> str:
        smallest, largest = self.ranges[name]
        amax = (
            f"{largest:.4g}"
            if smallest == largest
            else f"{smallest:.4g} .. {largest:.4g}"
        )
        return f"{amax} ({self.signs[name]})" if name in self.signs else amax

    def verdict(self) -> str:
        """Return one line: how many ranges there are, and what was decided beside them."""
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        end = f"{len(self.ranges)} ranges from {batches}"
        if self.kept:
            end += f", {len(self.kept)} kept from before"
        if self.operators.line:
            end += f"; {self.operators.line}"
        if self.factors.line:
            end += f"; {self.factors.line}"
        if self.even.line:
            end += f"; {self.even.line}"
        if self.averages.line:
            end += f"; {self.averages.line}"
        if self.correction is not None:
            end += f"; {self.correction.line}"
        return f"{end}; {self.evaluation}" if self.evaluation else end


def calibrate(
    model: nn.Module,
    batches: Iterable[object] | None = None,
    *,
    method: str | None = None,
    forward: Forward | None = None,
    num_batches: int | None = None,
    on_unseen: OnUnseen = "error",
    force: bool = False,
    correct: bool = True,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
    **options: object,
) -> CalibrationReport:
    """Set the range of every quantizer.

    Ranges of weights come from the weights, ranges of activations from ``batches``. The model
    runs in eval mode, without gradients and unquantized, and gets its modes back afterwards.
    Quantizers that are off stay off, and quantizers with dynamic ranges stay dynamic.

    Args:
        model: a quantized model.
        batches: each one holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. Tensors are moved to the model's device. None
            calibrates weights alone.
        method: how activations are calibrated, a name in :func:`torchq.calib.methods`. None
            takes the method of each descriptor.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        on_unseen: what happens to activation quantizers that no batch reached: ``"error"`` names
            them all, ``"disable"`` turns them off, ``"dynamic"`` lets them take the range of
            each call.
        force: replace ranges that are known already. Without it they are kept, with one warning.
        correct: take back what quantization does to the results of convolutions and linear layers:
            the mean error that each adds, or with 4 bits and fewer a gain and a mean error of each
            output channel, fitted in the order in which layers run. A third of the batches is read
            once more for it. Weights and biases stay as they are:
            see :mod:`torchq.nn.correction`. Operators beside layers whose quantizers cost too much
            at the outputs of the model are left in float, as the report and the plan say: see
            :mod:`torchq.workflow.added_operators`. A rule that names one keeps it, and the next
            calibration decides anew. Where linear layers carry the work, the channels that they
            read are divided by factors if the outputs are nearer to float then: see
            :mod:`torchq.workflow.linear_factors`. Those that depthwise convolutions read are
            brought to one size on the same condition: see :mod:`torchq.workflow.even_channels`.
            Where no ``method`` is given, ranges of
            activations are averaged over samples if that brings the outputs nearer to float: see
            :mod:`torchq.workflow.averaged_ranges`.
        group: join the statistics of these processes (``torch.distributed.group.WORLD``), each
            with its own ``batches``: every rank gets the bits that one process would get from
            rank 0's batches, then rank 1's, and so on. Ranks may have different numbers of
            batches, even none, unless the model itself communicates (FSDP). Without a group each
            process calibrates on its own batches alone, with one warning if there are several.
        progress: show a bar (in a group, on its first rank).
        **options: for the calibrator, such as ``percentile=99.9`` or ``num_bins=4096``.

    Returns:
        A report of batches, ranges, and quantizers without data; ``print`` it.

    Raises:
        CalibrationError: A quantizer saw no data (``on_unseen="error"``), or NaN or infinite
            values, or there was no batch; the text names each quantizer, and the ranges of the
            others are set. Or a rank of the group did not arrive within ten minutes after the
            last batch of another.
        ConfigError: The model has no quantizers, or an argument is invalid; or the batches of a
            model with 4 bits and fewer can be read only once.

    Anything else that ends the call, such as Ctrl-C or an error of the model, leaves every range
    and correction as it was.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2, bias=False))
        >>> report = torchq.quantize_(model)
        >>> print(torchq.calibrate(model, [torch.ones(2, 4)], progress=False).batches)
        1
    """
    model = utils.network_of(model)
    _check_arguments(batches, forward, on_unseen, method, num_batches)
    # Wrappers would exchange buffers in their first forward, and wait for a rank without a batch.
    # In training mode parametrizations such as spectral_norm change where a weight is only read.
    with utils.evaluating(model := utils.unwrapped(model)), torch.no_grad():
        todo, kept_paths = _pending(model, force)
        _warn_of_other_ranks(batches, group)
        corrects = correct and bool(todo) and batches is not None
        floats = Outputs() if corrects and _reads_again(model, batches, group) else None
        runs = Runs(model, () if batches is None else batches, forward)
        count = 0
        chosen = OperatorChoice()
        factors = LinearFactorChoice()
        even = EvenChoice()
        averages = RangeChoice()
        unseen: tuple[str, ...] = ()
        with _undone_on_error(model):
            if floats is not None and take_back_operators_(runs):
                todo, kept_paths = _pending(model, force)
            activations = _of_activations(model, todo)
            samples = None if batches is None else _samples(model, todo)
            joined = Concatenations(model, activations)
            inputs = LinearInputs({})
            depthwise = DepthwiseInputs({}, method)
            ends = SampleEnds({}, method)
            if floats is not None:
                ends = SampleEnds(activations, method)
                to_set = {id(q) for q in todo.values()}
                take_back_factors_(model, to_set)
                inputs = LinearInputs(linear_layers(model, to_set, method))
                depthwise = DepthwiseInputs(depthwise_layers(model, to_set), method)
            with _weights_after_errors(
                model, pending := {id(q) for q in todo.values()}
            ):
                if batches is not None and (activations or group or samples):
                    observing = _observing(model, activations, method, options)
                    with (
                        observing,
                        inputs.recording(),
                        depthwise.recording(),
                        ends.recording(),
                        joined.recording(),
                    ):
                        reading = (runs, num_batches, progress, floats)
                        count, unseen = _observed(reading, activations, samples, group)
                    _treat_unseen({n: activations[n] for n in unseen}, on_unseen, count)
            make_equal_(joined, activations, group)
            # Weights come last: weight_norm and its like compute the weight in a forward pass.
            calibrate_weights(model, only=pending, samples=samples, group=group)
            if floats is not None:
                forget_corrections(model)
                few = FewSamples(runs, count)
                chosen = choose_operators_(runs, few, group)
                factors = choose_factors_(runs, inputs, few, group)
                averages = choose_ranges_(runs, ends, few, group)
                if averages.averaged:
                    make_equal_(joined, activations, group)
                even = choose_even_channels_(runs, depthwise, few, group)
                averages = averages.without(
                    f"{name}.input_quantizer" for name in even.layers
                )
            done = _corrected(runs, count // 3, floats, group) if todo else None
    if corrects and done is None:
        warnings.warn(f"calibrate: {_READ_ONCE}", stacklevel=2)
    return CalibrationReport(
        count,
        _bounds(todo),
        kept_paths,
        unseen,
        _signs(todo),
        done,
        evaluation_of(model),
        chosen,
        factors,
        averages,
        even,
    )


def _undone_on_error(model: nn.Module) -> AbstractContextManager[object]:
    """Give a model its ranges, corrections and plan back where anything but data is wrong."""
    written = [b for q in quantizers(model).values() for b in q.buffers()]
    return utils.undone_on_error(model, written=written, but=CalibrationError)


def _of_activations(
    model: nn.Module, chosen: Mapping[str, TensorQuantizer]
) -> dict[str, TensorQuantizer]:
    of_weights = weight_quantizers(model)
    return {name: q for name, q in chosen.items() if id(q) not in of_weights}


@contextmanager
def _weights_after_errors(model: nn.Module, pending: set[int]) -> Iterator[None]:
    """Set the ranges of weights also where those of inputs cannot be."""
    try:
        yield
    except CalibrationError:
        calibrate_weights(model, only=pending)
        raise


def _corrected(
    runs: Runs, most: int, floats: Outputs | None, group: dist.ProcessGroup | None
) -> Correction | None:
    """Forget corrections, fit new ones on the first batches, and keep them where they help.

    None is returned without ``floats``, and for batches that are not there any more.
    """
    forget_corrections(runs.model)
    if floats is None:
        return None
    few = needs_gains(runs.model)
    float_outputs = floats if floats.batches else None
    done = correct_results(
        runs, max(1, most), gains=few, in_order=few, floats=float_outputs, group=group
    )
    is_gone = group is None and floats.batches and NOT_READ in done.skipped.values()
    return None if is_gone else done


def _is_first(group: dist.ProcessGroup | None) -> bool:
    return group is None or dist.get_rank(group) == 0


def _reads_again(
    model: nn.Module, batches: Iterable[object] | None, group: dist.ProcessGroup | None
) -> bool:
    """Return True if all ranks can read their batches again.

    Raises:
        ConfigError: a model with 4 bits, which wants them twice.
    """
    can_read = torch.tensor(
        float(not isinstance(batches, Iterator)), device=utils.device_of(model)
    )
    if group is not None:
        dist.all_reduce(can_read, dist.ReduceOp.MIN, group=group)
    if can_read:
        return True
    if needs_gains(model):
        raise ConfigError(f"calibrate: {_READ_ONCE}")
    return False


def _samples(
    model: nn.Module, chosen: Mapping[str, TensorQuantizer]
) -> OutputSamples | None:
    """Return what keeps inputs of layers, or None if no method of weights needs them."""
    needed = any(q.descriptor.calib_method == _BY_OUTPUT for q in chosen.values())
    return OutputSamples(model) if needed else None


def _signs(chosen: Mapping[str, TensorQuantizer]) -> dict[str, str]:
    """Return which sign of the codes those quantizers have that chose it."""
    return {
        name: "unsigned" if q.descriptor.unsigned else "signed"
        for name, q in chosen.items()
        if q.calibrated and q.given_descriptor.unsigned == "auto"
    }


def calibrate_weights(
    model: nn.Module,
    *,
    only: set[int] | None = None,
    method: str | None = None,
    samples: OutputSamples | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Set the range of every weight quantizer from its weight; no data is needed.

    Args:
        model: a quantized model.
        only: ids of the quantizers to treat; None treats all that are on and not dynamic.
        method: in place of that of each descriptor.
        samples: inputs of layers, for the method ``"activation"``.
        group: processes that search together.

    Raises:
        CalibrationError: A weight holds NaN or infinity; the text names its quantizer.
    """
    model = utils.network_of(model)
    failed: dict[str, str] = {}
    for module in model.modules():
        if isinstance(module, QuantModule):
            for quantizer, weight in module.quantized_weights():
                chosen = (
                    quantizer.quantizing and not quantizer.descriptor.dynamic
                    if only is None
                    else id(quantizer) in only
                )
                by_output = (method or quantizer.descriptor.calib_method) == _BY_OUTPUT
                if chosen and not (
                    by_output and set_range_by_output(module, quantizer, samples, group)
                ):
                    try:
                        quantizer.calibrate_on(quantizer.scaled(weight), method)
                    except CalibrationError as error:
                        failed[quantizer.name or "TensorQuantizer"] = str(error)
    _raise_together(failed)


def _check_arguments(
    batches: object,
    forward: object,
    on_unseen: object,
    method: object,
    num_batches: object,
) -> None:
    if forward is not None and not callable(forward):
        raise ConfigError(
            f"calibrate: got forward={forward!r}; expected a function of the model and a batch"
        )
    if method is not None and method not in methods():
        raise ConfigError(
            f"calibrate: got method={method!r}; expected one of: {', '.join(methods())}"
        )
    if on_unseen not in ("error", "disable", "dynamic"):
        raise ConfigError(
            f"calibrate: got on_unseen={on_unseen!r}; expected 'error', 'disable' or 'dynamic'"
        )
    utils.check_batches("calibrate", () if batches is None else batches, num_batches)


def _warn_of_other_ranks(batches: object, group: dist.ProcessGroup | None) -> None:
    if batches is None or group is not None:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"calibrate: this is one of {dist.get_world_size()} processes and uses its own "
            "batches alone, so each gets other ranges; pass "
            "group=torch.distributed.group.WORLD to join them, or a group of this process if that "
            "is meant",
            stacklevel=3,
        )


def _pending(
    model: nn.Module, force: bool
) -> tuple[dict[str, TensorQuantizer], tuple[str, ...]]:
    """Name all quantizers; return those to calibrate, and the paths of those that keep a range."""
    by_path = quantizers(model)
    if not by_path:
        raise ConfigError(
            f"calibrate: {type(model).__name__} has no quantizer; expected a quantized model. "
            "Run torchq.quantize_(model) first"
        )
    for name, quantizer in by_path.items():
        quantizer.name = name
        if isinstance(quantizer.amax, Tensor) and quantizer.amax.is_meta:
            raise ConfigError(
                f"calibrate: {name}: is on the meta device, where tensors have no numbers; "
                "expected a model with its weights. Call model.to_empty(device='cpu') and load them"
            )
    live = {
        name: q
        for name, q in by_path.items()
        if q.quantizing and not q.descriptor.dynamic
    }
    fixed = {name for name, q in live.items() if q.descriptor.amax is not None}
    done = {name for name, q in live.items() if q.calibrated} - fixed
    of_weights = weight_quantizers(model)
    of_inputs = {name for name, q in live.items() if id(q) not in of_weights}
    # Where weights and no inputs have ranges, :func:`calibrate_weights` has set them.
    are_weights = of_inputs and done.isdisjoint(of_inputs)
    is_meant = _is_adopted(model) and len(done) + len(fixed) < len(live)
    if done and not force and not are_weights and not is_meant:
        names = ", ".join(sorted(done)[:4]) + (", ..." if len(done) > 4 else "")
        warnings.warn(
            f"calibrate: {len(done)} quantizers are calibrated already and keep their ranges "
            f"({names}); force=True replaces them",
            stacklevel=3,
        )
    keep = fixed | (set() if force else done)
    to_calibrate = {name: q for name, q in live.items() if name not in keep}
    return to_calibrate, tuple(name for name in live if name in keep)


def _is_adopted(model: nn.Module) -> bool:
    """Return True for a model with ranges of another maker, beside which it may need others."""
    plans = [plan for _, plan in recorded_plans(model)]
    return any(d.adopted for plan in plans for d in plan.replaced)


def _run(
    runs: Runs, num_batches: int | None, show: bool, outputs: Outputs | None
) -> int:
    """Run the model on the batches, perhaps with a bar, and return how many there were.

    ``outputs`` gets what the model returned. Batches and the state of the model stay as they are.
    """
    batches = runs.batches
    few = isinstance(batches, Sized) and len(batches) <= _MANY
    unbounded = num_batches is None and not few
    shown = utils.progress_bar(
        batches,
        description=f"calibrate{_ALL if unbounded else ''}",
        most=num_batches,
        enabled=show,
    )
    count = 0
    with utils.state_kept(runs.model):
        for batch in shown:
            results = runs.call(batch)
            count += 1
            if outputs is not None:
                outputs.add(Fingerprint(batch), results)
        computed = _weights_of_hooks(runs.model)
    for module, weight in computed.items():
        module.weight = weight
    return count


def _weights_of_hooks(model: nn.Module) -> dict[Any, Tensor]:
    """Return the weights that hooks compute from their parts in each forward.

    The older weight_norm and spectral_norm of torch do so. Such a weight is no state: the one that
    the module has had before may belong to other parts.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantModule)]
    weights = {layer: vars(layer).get("weight") for layer in layers}
    return {
        layer: weight for layer, weight in weights.items() if isinstance(weight, Tensor)
    }


def _observed(
    reading: tuple[Runs, int | None, bool, Outputs | None],
    activations: Mapping[str, TensorQuantizer],
    samples: OutputSamples | None,
    group: dist.ProcessGroup | None,
) -> tuple[int, tuple[str, ...]]:
    """Set ranges from the batches of all ranks; return their number, and who saw no data."""
    runs, num_batches, progress, floats = reading
    count = 0
    if activations or samples:
        shows = progress and _is_first(group)
        with samples.recording() if samples else nullcontext():
            count = _run(runs, num_batches, shows, floats)
    if group is not None:
        named = {
            name: q.calibrator
            for name, q in activations.items()
            if q.calibrator is not None
        }
        sync(list(named.values()), group, names=list(named))
    elif not count:
        raise CalibrationError(
            "calibrate: got no batch; expected at least one. A generator runs only once: make a "
            "new one"
        )
    return count, _set_ranges(activations)


@contextmanager
def _observing(
    model: nn.Module,
    chosen: Mapping[str, TensorQuantizer],
    method: str | None,
    options: Mapping[str, object],
) -> Iterator[None]:
    """Let the chosen quantizers observe and none of the model quantize, in eval mode."""
    with utils.evaluating(model), switched_off(quantizers(model).values()):
        try:
            for quantizer in chosen.values():
                quantizer.start_calibration(method, **options)
            yield
        finally:
            for quantizer in chosen.values():
                quantizer.calibrator = None


def _set_ranges(chosen: Mapping[str, TensorQuantizer]) -> tuple[str, ...]:
    """Set every range from what was observed; return the names of those that saw nothing."""
    unseen = []
    failed = dict[str, str]()
    for name, quantizer in chosen.items():
        if quantizer.calibrator is None or not quantizer.calibrator.seen:
            unseen.append(name)
            continue
        try:
            quantizer.finish_calibration()
            quantizer.widen_dead_channels()
        except CalibrationError as error:
            failed[name] = str(error)
    _raise_together(failed)
    return tuple(unseen)


def _raise_together(failed: Mapping[str, str]) -> None:
    """Raise one error that names each quantizer that failed, and each reason once."""
    names: dict[str, list[str]] = {}
    for name, failure in failed.items():
        names.setdefault(failure.removeprefix(f"{name}: "), []).append(name)
    if names:
        reasons = (f"{', '.join(some)}: {reason}" for reason, some in names.items())
        raise CalibrationError("calibrate: " + "; ".join(reasons))


def _treat_unseen(
    unseen: dict[str, TensorQuantizer], on_unseen: OnUnseen, count: int
) -> None:
    log.debug("calibrated on %d batches, unseen: %s", count, list(unseen))
    if unseen and on_unseen == "error":
        raise CalibrationError(
            f"calibrate: no tensor reached {', '.join(unseen)} in {count} batches; expected every "
            "quantizer to see data. Pass on_unseen='disable' or 'dynamic', or batches that use "
            "these branches; a layer whose parent reads its weight without calling it belongs in "
            "exclude"
        )
    if on_unseen == "disable":
        for quantizer in unseen.values():
            quantizer.mode = "off"


def _bounds(chosen: Mapping[str, TensorQuantizer]) -> dict[str, tuple[float, float]]:
    """Return the least and the largest end of each known range."""
    bounds = {}
    for name, quantizer in chosen.items():
        if quantizer.calibrated:
            ends = [end.detach().flatten() for _, end in quantizer.range.ends()]
            least, largest = torch.aminmax(torch.cat(ends))
            bounds[name] = float(least), float(largest)
    return bounds
