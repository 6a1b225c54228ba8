"""Taking back what quantization does to the results of layers; no labels are needed.

Rounding and clipping shift the mean of each output channel, and shrink it. Where ranges hold all
values, the mean error that a layer adds by itself is taken back: in one run of the quantized model
each layer computes in float too what it makes of its input. With 4 bits and fewer, gain and shift
of each channel are fitted in the order in which layers run, so that each sees the corrected results
of those before it, against what the whole model computes in float in the same run. Shifts alone
would be wrong there: the mean error is that of few large values.

Nothing is believed. A fit is kept where the error at its layer falls on results that it was not
made from, and all of them are kept where the error at the output of the model falls.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.formats import PerAxis
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.correction import Corrected, forget_corrections, without_corrections
from torchq.utils import (
    RandomState,
    device_of,
    evaluating,
    state_kept,
    table,
    undone_on_error,
)
from torchq.workflow.modes import quantized_weights, quantizers
from torchq.workflow.runs import (
    NO_BATCH,
    Comparison,
    Fingerprint,
    NoiseSums,
    Outputs,
    Runs,
    shortened,
)
from torchq.workflow.two_versions import TwoVersions, float_call, forward_replaced

#: Widths up to which gains are fitted.
_FEW_BITS = 4
#: Methods of ranges that hold all values, so that results keep their size.
_WHOLE = frozenset(["max", "moving_average"])
#: Positions of a layer and batch that the fit looks at.
_POSITIONS = 4096
#: Results of a channel for each number that is fitted to them, below which it is left alone.
_FEW_RESULTS = 4
#: Into how many parts results are dealt to try a fit on what it was not made from.
_FOLDS = 4
#: Limits of a gain; a least-squares fit beyond them has seen too little.
_GAINS = (0.5, 2.0)
#: The error beside the deviation of results from which on better rounding is advised.
_LARGE = 0.5

#: Runs the model on a batch in some version; returns its floating-point results.
Run = Callable[[Any], list[Tensor]]


@dataclass(frozen=True)
class Correction:
    """What a calibration corrected.

    Attributes:
        layers: path of each corrected layer -> the root mean square of its shifts over that of its
            results.
        skipped: path of each other quantized layer -> why its results are not corrected.
        gains: True if each output channel has a gain too.
        batches: how many were read.
        repeated: paths of corrected layers that run several times; their first call was fitted.
        errors: path of each corrected layer -> the root mean square of the error that is left in
            its results over their deviation. With gains it holds the errors of earlier layers too.
        outputs: what the correction does to the outputs of the model. Where it makes them worse,
            or nothing can be compared, no layer is corrected and each is among ``skipped``.
    """

    layers: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    gains: bool = False
    batches: int = 0
    repeated: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    outputs: Comparison = field(default_factory=Comparison)

    @property
    def weak(self) -> tuple[str, ...]:
        """Paths of layers with few bits whose results are wrong beyond gain and bias."""
        return tuple(
            n for n, error in self.errors.items() if self.gains and error > _LARGE
        )

    @property
    def line(self) -> str:
        """Say in one line what was done, and what helps where that is not enough."""
        what = "gain and bias" if self.gains else "bias"
        not_corrected = f", {len(self.skipped)} not" if self.skipped else ""
        sentence = f"corrected {what} of {len(self.layers)} layers{not_corrected}"
        if self.repeated:
            sentence += (
                f"; {', '.join(self.repeated[:3])} by the first of several calls"
            )
        if self.outputs.batches:
            sentence += f"; {self.outputs}"
            sentence += ", so it is left out" if self.outputs.is_worse else ""
        if not self.weak:
            return sentence
        error, worst = max((self.errors[name], name) for name in self.weak)
        return (
            f"{sentence}; errors of {len(self.weak)} are still large ({worst}: {error:.0%} of its "
            "deviation), which torchq.ptq.gptq_(model, batches) makes smaller"
        )

    def __str__(self) -> str:
        rows = [
            ("layer", "change beside the size of its results", "error that is left")
        ]
        for name, change in self.layers.items():
            rows.append((name, f"{change:.2%}", f"{self.errors.get(name, 0.0):.0%}"))
        rows += [(name, reason, "") for name, reason in self.skipped.items()]
        return table(rows, self.line)


def needs_gains(model: nn.Module) -> bool:
    """Return True if a layer has weights or inputs of 4 bits or fewer."""
    return any(
        quantizer.descriptor.format.bits <= _FEW_BITS
        for module in model.modules()
        if isinstance(module, Corrected)
        for quantizer in _quantizers_of(module)
    )


def uncorrected(model: nn.Module) -> list[str]:
    """Return the layers of a calibrated model for which no correction was tried."""
    few = needs_gains(model)
    layers, _ = _candidates(model, few, may_clip=few)
    done = {
        n
        for n, layer in layers.items()
        if layer.is_corrected or layer.needs_no_correction
    }
    return [name for name in layers if name not in done]


def _quantizers_of(layer: Any) -> list[TensorQuantizer]:
    slots = (layer.input_quantizer, layer.weight_quantizer)
    return [q for q in slots if isinstance(q, TensorQuantizer) and q.quantizing]


def correct(
    runs: Runs,
    most: int | None = None,
    *,
    gains: bool,
    in_order: bool,
    floats: Outputs | None = None,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Set the corrections of all layers whose results can be corrected, and keep what helps.

    Args:
        runs: a calibrated model, and its batches. Corrections that are there are replaced.
        most: how many batches are read; None for all.
        gains: fit a gain of each output channel too; in order alone.
        in_order: fit each layer behind the corrected ones before it, in two versions of one run;
            else each layer's own error, on what it reads in the quantized model.
        floats: what the float model returned for the batches; None to compute it.
        group: processes whose batches count together.

    Raises:
        CalibrationError: a result is NaN or infinite; the text names the layer.
    """
    model = runs.model
    layers, skipped = _candidates(model, gains, may_clip=in_order)
    if not layers:
        return Correction({}, skipped, gains)
    fits = {name: _Fit(layer, gains) for name, layer in layers.items()}
    undone = undone_on_error(*layers.values())
    with torch.no_grad(), undone, evaluating(model):
        forget_corrections(model)
        plain, count = _fitted(fits, runs, most, in_order, group)
        if most is not None and _lack_rows(fits):
            most = None  # Where the first batches are empty, others may have rows.
            plain, count = _fitted(fits, runs, most, in_order, group)
        if _lack_rows(fits):
            raise CalibrationError(
                "correction of results: got batches without rows; expected at least one row. Check "
                "the batches"
            )
        if not count and group is None:
            return Correction({}, skipped | dict.fromkeys(layers, NOT_READ), gains)
        if floats is None:
            floats = _outputs(runs, most, in_float=True)
        if plain is None:
            plain = _outputs(runs, most)
        obstacles = {name: fit.obstacle for name, fit in fits.items()}
        skipped |= {name: reason for name, reason in obstacles.items() if reason}
        changes = {
            name: fit.apply() for name, fit in fits.items() if not obstacles[name]
        }
        outputs = (
            _compared(runs, most, floats, plain, group) if changes else Comparison()
        )
        if changes and (outputs.is_worse or not outputs.batches):
            forget_corrections(model)
            skipped |= dict.fromkeys(changes, _DROPPED if outputs.batches else NOT_READ)
            changes = {}
        for name in layers.keys() - changes.keys():
            layers[name].needs_no_correction = True
        repeated = tuple(name for name in changes if fits[name].repeated)
        errors = {name: fits[name].error() for name in changes}
    return Correction(changes, skipped, gains, count, repeated, errors, outputs)


#: Why layers are not corrected where batches end before all is read that is to be read.
NOT_READ = "the batches can be read only once, so nothing shows that corrections help"
_DROPPED = "with all corrections the output of the model is worse than without"


def _fitted(
    fits: Mapping[str, "_Fit"],
    runs: Runs,
    most: int | None,
    in_order: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Outputs | None, int]:
    """Add all batches to the fits; return outputs without a correction, if known, and the count."""
    plain = Outputs()
    fitting = _FittingInOrder(fits) if in_order else _FittingOwnErrors(fits)

    def step(number: int, batch: object) -> None:
        if batch is not NO_BATCH:
            with fitting.watching(runs.model):
                results = runs.call(batch)
            if not in_order:
                plain.add(Fingerprint(batch), results)
        if in_order:
            _join(fits, group)

    with _results_shown(fits.values()):
        count = runs.again(step, most, group)
    fitting.note_readers()
    _join(fits, group)
    for name, fit in fits.items():
        fit.check(name)
    return None if in_order else plain, count


def _lack_rows(fits: Mapping[str, "_Fit"]) -> bool:
    """Return True if layers were called, and none of them with a row."""
    called = [fit for fit in fits.values() if fit.was_called]
    return bool(called) and not any(fit.count for fit in called)


def _outputs(runs: Runs, most: int | None, *, in_float: bool = False) -> Outputs:
    """Return what the model returns for the batches, as it is or in float."""
    outputs = Outputs()
    off = list(quantizers(runs.model).values()) if in_float else []

    def step(number: int, batch: object) -> None:
        with switched_off(off):
            outputs.add(Fingerprint(batch), runs.call(batch))

    runs.again(step, most)
    return outputs


def _compared(
    runs: Runs,
    most: int | None,
    floats: Outputs,
    plain: Outputs,
    group: dist.ProcessGroup | None,
) -> Comparison:
    """Compare outputs with and without corrections with those in float, batch by batch.

    A loader may give other batches than before. The float model and the one without corrections
    run once more on these, from where this version is.
    """
    model = runs.model
    sums = NoiseSums()
    all_quantizers = list(quantizers(model).values())

    def other(batch: object, version: AbstractContextManager[object]) -> list[Tensor]:
        start = RandomState.now()
        with state_kept(model), version:
            results = runs.call(batch)
        start.restore()
        return results

    def step(number: int, batch: object) -> None:
        fingerprint = Fingerprint(batch)
        reference = floats.of(number, fingerprint)
        before = plain.of(number, fingerprint)
        if reference is None:
            reference = shortened(other(batch, switched_off(all_quantizers)))
        if before is None:
            before = shortened(other(batch, without_corrections(model)))
        sums.add(reference, before, shortened(runs.call(batch)))

    runs.again(step, most)
    return sums.comparison(group, device_of(model))


def _candidates(
    model: nn.Module, gains: bool, may_clip: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers to correct, and why other quantized layers are not."""
    layers: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    owners = Counter(id(quantizer) for quantizer, _ in quantized_weights(model))
    for name, module in model.named_modules():
        if not isinstance(module, QuantModule) or not list(module.quantized_weights()):
            continue
        reason = _obstacle(module, gains, may_clip)
        if gains and not reason and owners[id(module.weight_quantizer)] > 1:
            reason = "its weight has the quantizer of another one"
        if reason:
            skipped[name] = reason
        else:
            layers[name] = module
    return layers, skipped


def _obstacle(layer: Any, gains: bool, may_clip: bool) -> str:
    """Return why the results of a layer are not corrected; "" if they are."""
    if not isinstance(layer, Corrected):
        return "it is no convolution or linear layer"
    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    if layer.bias is None:
        return "it has no bias; fuse BatchNorm first"
    if not isinstance(layer.bias, nn.Parameter) or layer._forward_pre_hooks:
        return "its bias may be computed before each call"
    if hasattr(layer.weight, "full_tensor"):
        return "its weight is spread over ranks"
    active = _quantizers_of(layer)
    if not active:
        return "its quantizers are off"
    if gains:
        granularity = layer.weight_quantizer.descriptor.granularity  # type: ignore[union-attr]
        if layer.channel_axis or granularity != PerAxis((0,)):
            return "its weight has no scale for each output channel"
        if not isinstance(layer.weight, nn.Parameter):
            return "its weight is computed"
    elif not may_clip and any(q.descriptor.calib_method not in _WHOLE for q in active):
        return "its ranges may clip, which shifts alone do not mend"
    return ""


class _Fit:
    """Sums of results of one layer, in float and quantized, and what follows from them.

    Positions are dealt to a few folds, so that a fit to the others can be tried on each.
    """

    def __init__(self, layer: Any, gains: bool) -> None:
        self.layer, self.gains = layer, gains
        #: For each fold the count and sums of y, r, y*r, r*r and y*y, (folds, 6, channels): y in
        #: float, r not corrected.
        self.sums = torch.zeros(
            _FOLDS, 6, len(layer.bias), dtype=torch.float64, device=layer.weight.device
        )
        #: What ranks joined already, of which nothing is sent again.
        self.joined = torch.zeros_like(self.sums)
        self.repeated = False
        #: Whether a batch ran the layer, perhaps with no rows.
        self.was_called = False
        #: Whether code outside of the layer reads its weight or bias.
        self.has_readers = False
        #: The quantizer of its results, which is out of the way while results are fitted.
        self.of_results: object = None

    def add(self, y: Tensor, r: Tensor) -> None:
        """Add results (channels, positions)."""
        self.was_called = True
        # In one order of positions sums have the same bits, however the layer lays them out.
        y, r = y.double().contiguous(), r.double().contiguous()
        terms = (y, r, y * r, r * r, y * y)
        folds = []
        for number in range(_FOLDS):
            sums = [term[..., number::_FOLDS].sum(-1) for term in terms]
            count = len(range(number, y.shape[-1], _FOLDS))
            folds.append(torch.stack([torch.full_like(sums[0], count), *sums]))
        self.sums = self.sums + torch.stack(folds)

    @property
    def count(self) -> float:
        """How many results of each channel were added."""
        return float(self.sums[:, 0, 0].sum()) if self.sums.shape[-1] else 0.0

    @property
    def obstacle(self) -> str:
        """The reason why the layer is not corrected; "" if it is."""
        if not self.count:
            return (
                "its batches have no rows" if self.was_called else "no batch reached it"
            )
        if self.has_readers:
            return "its weight or bias is read outside of it too"
        if self.count < _FEW_RESULTS * (1 + self.gains):
            return f"{self.count:.0f} results of each channel are too few; pass more batches"
        return "" if self.helps else "the error of its results does not fall"

    @property
    def helps(self) -> bool:
        """True if fits to the other folds lower the error of each fold, taken together."""
        total = self.sums.sum(0)
        zeros = torch.zeros_like(total[0])
        with_fit = sum(
            _square_error(fold, *self.solve(total - fold)) for fold in self.sums
        )
        return bool(with_fit < _square_error(total, None, zeros))

    def solve(self, sums: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """Return gain and shift for sums (6, channels), by default all so far."""
        count, *others = self.sums.sum(0) if sums is None else sums
        mean_y, mean_r, mean_yr, mean_rr, _ = (
            total / count.clamp_min(1) for total in others
        )
        if not self.gains:
            return None, mean_y - mean_r
        variance = mean_rr - mean_r.square()
        gain = (mean_yr - mean_y * mean_r) / variance
        # A channel that is constant up to rounding has no slope.
        flat = variance <= 1e-12 * mean_rr.clamp_min(1e-30)
        gain = torch.where(flat, torch.ones_like(gain), gain).clamp(*_GAINS)
        return gain, mean_y - gain * mean_r

    def check(self, name: str) -> None:
        """Raise CalibrationError for sums that are not finite; a layer without rows has none."""
        if self.was_called and not bool(self.sums.isfinite().all()):
            raise CalibrationError(
                f"correction of results: {name}: got NaN or infinite results; expected finite "
                "ones. Check the input and the layers before"
            )

    def apply(self) -> float:
        """Correct the layer; return the size of its shifts beside that of its results."""
        gain, shift = self.solve()
        if gain is not None:
            shift = shift + (gain - 1) * self.layer.bias.detach().double()
        self.layer.correct_output_(gain, shift)
        count, y, *_ = self.sums.sum(0)
        size = (y / count).square().mean().sqrt()
        change = self.layer.output_shift.double().square().mean().sqrt()
        return float(change / size.clamp_min(1e-30))

    def error(self) -> float:
        """Return the error that gain and shift leave, beside the deviation of the results."""
        sums = self.sums.sum(0)
        count, y, *_, yy = sums
        deviation = (yy - y * y / count).sum().clamp_min(1e-30)
        return float(
            (_square_error(sums, *self.solve()) / deviation).clamp_min(0).sqrt()
        )


def _square_error(sums: Tensor, gain: Tensor | None, shift: Tensor) -> Tensor:
    """Return the sum of (y - gain * r - shift)^2 over all results, from their sums."""
    count, y, r, yr, rr, yy = sums
    g = torch.ones_like(y) if gain is None else gain
    # Multiplied out, as the sums over the results are known and the results are not kept.
    squares = (
        yy
        - 2 * g * yr
        - 2 * shift * y
        + g * g * rr
        + 2 * g * shift * r
        + count * shift * shift
    )
    return squares.sum()


def _channel_axis(layer: Any, dims: int) -> int:
    """Return the axis of the channels in results of so many dimensions."""
    return dims - 1 if isinstance(layer, nn.Linear) else dims - layer.weight.dim() + 1


def _rows(layer: Any, out: Tensor, most: int | None = None) -> Tensor:
    """Return copies of results as (channels, positions), evenly spread if more than ``most``."""
    rows = out.detach().movedim(_channel_axis(layer, out.dim()), 0)
    rows = rows.reshape(rows.shape[0], -1)
    step = 1 if most is None else max(1, -(-rows.shape[1] // most))
    return rows[:, ::step].clone()


@contextmanager
def _results_shown(fits: Iterable[_Fit]) -> Iterator[None]:
    """Let layers return what they add up: without the quantizer of results that some have."""
    hidden = [fit for fit in fits if fit.layer.quantizes_output]
    try:
        for fit in hidden:
            fit.of_results = fit.layer.output_quantizer
            del fit.layer.output_quantizer
        yield
    finally:
        for fit in hidden:
            fit.layer.output_quantizer = fit.of_results


class _Fitting(ABC):
    """One run after the other, in which layers show their results in float and quantized.

    Both sides of a pair come from one run and from one call. Of the calls of a layer in a run the
    first is fitted. Hooks of users see what the layer returns.
    """

    def __init__(self, fits: Mapping[str, _Fit]) -> None:
        self.fits = {id(fit.layer): fit for fit in fits.values()}
        self.versions = TwoVersions()
        self._seen: set[int] = set()

    def note_readers(self) -> None:
        """Note of each layer whether code outside of it reads its weight or bias."""
        for fit in self.fits.values():
            parameters = fit.layer.parameters(recurse=False)
            fit.has_readers = any(map(self.versions.reads, parameters))

    def is_first(self, fit: _Fit) -> bool:
        """Return True for the first call of a layer in a run."""
        if id(fit) in self._seen:
            fit.repeated = True
            return False
        self._seen.add(id(fit))
        return True

    def watching(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context for one run of the model."""
        self._seen.clear()
        return self._run(model)

    @abstractmethod
    def _run(self, model: nn.Module) -> AbstractContextManager[None]: ...


class _FittingOwnErrors(_Fitting):
    """Each layer computes in float what it makes of its input in the quantized model."""

    @contextmanager
    def _run(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for fit in self.fits.values():
                forward = partial(self._call, fit, fit.layer.forward)
                stack.enter_context(forward_replaced(fit.layer, forward))
            stack.enter_context(self.versions)
            yield

    def _call(self, fit: _Fit, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
        with self.versions.paused():
            result: Tensor = forward(*args, **kwargs)
            if self.is_first(fit):
                in_float = float_call(fit.layer, forward, args, kwargs)
                fit.add(_rows(fit.layer, in_float), _rows(fit.layer, result))
            shown: Tensor = fit.layer.quantized_result(result, fit.of_results)
        return shown


class _FittingInOrder(_Fitting):
    """The whole model runs in two versions, and each layer is behind the corrected ones."""

    @contextmanager
    def _run(self, model: nn.Module) -> Iterator[None]:
        with self.versions.watching(model, self._corrected), self.versions:
            yield

    def _corrected(self, module: nn.Module, result: Any, in_float: Any) -> object:
        fit = self.fits.get(id(module))
        if fit is None:
            return result
        # The layer has no correction while the fit runs: what it returns is what it adds up.
        if self.is_first(fit):
            rows = (
                _rows(fit.layer, version, _POSITIONS) for version in (in_float, result)
            )
            fit.add(*rows)
            gain, shift = fit.solve()
            shape = [1] * result.dim()
            shape[_channel_axis(fit.layer, result.dim())] = -1
            result = result if gain is None else result * gain.to(result).view(shape)
            result = result + shift.to(result).view(shape)
        return fit.layer.quantized_result(result, fit.of_results)


def _join(fits: Mapping[str, _Fit], group: dist.ProcessGroup | None) -> None:
    """Add the sums of the other ranks since the last call to those of this one."""
    if group is None:
        return
    for fit in fits.values():
        new = fit.sums - fit.joined
        readers = new.new_tensor([float(fit.has_readers)])
        of_rank = torch.cat([new.flatten(), readers])
        dist.all_reduce(of_rank, group=group)
        fit.sums = fit.joined + of_rank[:-1].view(fit.sums.shape)
        fit.joined = fit.sums
        fit.has_readers = bool(of_rank[-1])
