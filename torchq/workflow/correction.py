"""Taking back what quantization does to the results of layers; no labels are needed.

Rounding and clipping shift the mean of each output channel, and shrink it. Where ranges hold all
values, the mean error that a layer adds by itself is taken back: one pass of the float network, in
which each layer also computes its quantized result. With 4 bits and fewer, gain and shift of each
channel are fitted in the order in which layers run, so that each sees the corrected results of
those before it. Shifts alone would be wrong there: the mean error is that of few large values.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.formats import PerAxis
from torchq.graph import Forward, call_model
from torchq.nn import QuantModule, TensorQuantizer, quantizing_only
from torchq.nn.correction import Corrected, forget_corrections
from torchq.utils import device_of, evaluating, table, undone_on_error, watching
from torchq.workflow.modes import quantizers

#: Widths up to which gains are fitted.
_FEW_BITS = 4
#: Methods of ranges that hold all values, so that results keep their size.
_WHOLE = frozenset(["max", "moving_average"])
#: Positions of a layer and batch that the fit looks at.
_POSITIONS = 4096
#: Results of a channel for each number that is fitted to them, below which it is left alone.
_FEW_RESULTS = 4
#: Limits of a gain; a least-squares fit beyond them has seen too little.
_GAINS = (0.5, 2.0)
#: The error beside the deviation of results from which on better rounding is advised.
_LARGE = 0.5

#: Runs the model on a batch, or does so and adds what it shows.
Run = Callable[[Any], Any]


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
    """

    layers: Mapping[str, float] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    gains: bool = False
    batches: int = 0
    repeated: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)

    @property
    def weak(self) -> tuple[str, ...]:
        """Paths of layers with few bits whose results are wrong beyond gain and bias."""
        return tuple(n for n, error in self.errors.items() if self.gains and error > _LARGE)

    @property
    def line(self) -> str:
        """Say in one line what was done, and what helps where that is not enough."""
        what = "gain and bias" if self.gains else "bias"
        rest = f", {len(self.skipped)} not" if self.skipped else ""
        text = f"corrected {what} of {len(self.layers)} layers{rest}"
        if self.repeated:
            text += f"; {', '.join(self.repeated[:3])} by the first of several calls"
        if not self.weak:
            return text
        error, worst = max((self.errors[name], name) for name in self.weak)
        return (
            f"{text}; errors of {len(self.weak)} are still large ({worst}: {error:.0%} of its "
            "deviation), which torchq.ptq.gptq_(model, batches) makes smaller"
        )

    def __str__(self) -> str:
        rows = [("layer", "change beside the size of its results", "error that is left")]
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
    """Return the layers of a calibrated model whose results could be corrected and are not."""
    few = needs_gains(model)
    layers, _ = _candidates(model, few, may_clip=few)
    return [name for name, layer in layers.items() if not layer.is_corrected]


def _quantizers_of(layer: Any) -> list[TensorQuantizer]:
    found = (layer.input_quantizer, layer.weight_quantizer)
    return [q for q in found if isinstance(q, TensorQuantizer) and q.quantizing]


def correct(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    gains: bool,
    in_order: bool,
    forward: Forward | None = None,
    group: dist.ProcessGroup | None = None,
) -> Correction:
    """Set the corrections of all layers whose results can be corrected, from ``batches``.

    Args:
        model: a calibrated model. Corrections that are there are replaced.
        batches: read once; see :func:`torchq.graph.call_arguments`.
        gains: fit a gain of each output channel too; in order alone.
        in_order: fit each layer behind the corrected ones before it, in two runs of a batch; else
            each layer's own error, on what it reads in float.
        forward: called as ``forward(model, batch)`` in place of the model.
        group: processes whose batches count together.

    Raises:
        CalibrationError: a result is NaN or infinite; the text names the layer.
    """
    layers, skipped = _candidates(model, gains, may_clip=in_order)
    if not layers:
        return Correction({}, skipped, gains)
    fits = {name: _Fit(layer, gains) for name, layer in layers.items()}
    undone = undone_on_error(*layers.values())
    with torch.no_grad(), undone, evaluating(model), _results_shown(fits.values()):
        forget_corrections(model)
        device, count = device_of(model), 0
        call = partial(call_model, model, forward=forward, device=device)
        step = (_step_in_order if in_order else _step_of_own_errors)(model, fits, call)
        for batch in _batches_of_ranks(batches, group, device):
            if batch is not _NONE:
                count += 1
                step(batch)
            if in_order:
                _join(fits, group)
        if not in_order:
            _join(fits, group)
        for name, fit in fits.items():
            fit.check(name)
        skipped |= {name: fit.obstacle for name, fit in fits.items() if fit.obstacle}
        changes = {name: fit.apply() for name, fit in fits.items() if not fit.obstacle}
        repeated = tuple(name for name in changes if fits[name].repeated)
        errors = {name: fits[name].error() for name in changes}
    return Correction(changes, skipped, gains, count, repeated, errors)


def _candidates(
    model: nn.Module, gains: bool, may_clip: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the layers to correct, and why other quantized layers are not."""
    layers: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(module, QuantModule) or not list(module.quantized_weights()):
            continue
        reason = _obstacle(module, gains, may_clip)
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
    known = _quantizers_of(layer)
    if not known:
        return "its quantizers are off"
    if gains:
        granularity = layer.weight_quantizer.descriptor.granularity  # type: ignore[union-attr]
        if layer.channel_axis or granularity != PerAxis((0,)):
            return "its weight has no scale for each output channel"
        if not isinstance(layer.weight, nn.Parameter):
            return "its weight is computed"
    elif not may_clip and any(q.descriptor.calib_method not in _WHOLE for q in known):
        return "its ranges may clip, which shifts alone do not mend"
    return ""


class _Fit:
    """Sums of results of one layer, in float and quantized, and what follows from them."""

    def __init__(self, layer: Any, gains: bool) -> None:
        self.layer, self.gains = layer, gains
        self.count = 0.0
        #: Sums of y, r, y*r, r*r and y*y, (5, channels): y in float, r not corrected.
        self.sums: Tensor | None = None
        #: What ranks joined already, of which nothing is sent again.
        self.known: tuple[float, Tensor | None] = (0.0, None)
        self.rows: Tensor | None = None
        self.repeated = False
        #: The quantizer of its results, which is out of the way while results are fitted.
        self.of_results: Any = None

    def add(self, y: Tensor, r: Tensor) -> None:
        """Add results (channels, positions)."""
        y, r = y.double(), r.double()
        new = torch.stack([y.sum(1), r.sum(1), (y * r).sum(1), (r * r).sum(1), (y * y).sum(1)])
        self.sums = new if self.sums is None else self.sums + new
        self.count += y.shape[1]

    @property
    def obstacle(self) -> str:
        """The reason why nothing follows from the sums; "" if something does."""
        if self.sums is None:
            return "no batch reached it"
        few = f"{self.count:.0f} results of each channel are too few; pass more batches"
        return few if self.count < _FEW_RESULTS * (1 + self.gains) else ""

    def solve(self) -> tuple[Tensor | None, Tensor]:
        """Return gain and shift for the sums so far."""
        assert self.sums is not None
        mean_y, mean_r, mean_yr, mean_rr, _ = self.sums / self.count
        if not self.gains:
            return None, mean_y - mean_r
        variance = mean_rr - mean_r.square()
        gain = (mean_yr - mean_y * mean_r) / variance
        # A channel that is constant up to rounding has no slope.
        flat = variance <= 1e-12 * mean_rr.clamp_min(1e-30)
        gain = torch.where(flat, torch.ones_like(gain), gain).clamp(*_GAINS)
        return gain, mean_y - gain * mean_r

    def check(self, name: str) -> None:
        """Raise CalibrationError for sums that are not finite."""
        if self.sums is not None and not (self.count and bool(self.sums.isfinite().all())):
            what = "NaN or infinite results" if self.count else "batches without rows"
            raise CalibrationError(
                f"correction of results: {name}: got {what}; expected finite ones. Check the input "
                "and the layers before"
            )

    def apply(self) -> float:
        """Correct the layer; return the size of its shifts beside that of its results."""
        assert self.sums is not None
        gain, shift = self.solve()
        if gain is not None:
            shift = shift + (gain - 1) * self.layer.bias.detach().double()
        self.layer.correct_output_(gain, shift)
        size = (self.sums[0] / self.count).square().mean().sqrt()
        change = self.layer.output_shift.double().square().mean().sqrt()
        return float(change / size.clamp_min(1e-30))

    def error(self) -> float:
        """Return the error that gain and shift leave, beside the deviation of the results."""
        assert self.sums is not None
        gain, shift = self.solve()
        y, r, yr, rr, yy = self.sums / self.count
        g = torch.ones_like(y) if gain is None else gain
        left = yy - 2 * g * yr - 2 * shift * y + g * g * rr + 2 * g * shift * r + shift * shift
        return float((left.sum() / (yy - y * y).sum().clamp_min(1e-30)).clamp_min(0).sqrt())


def _rows(layer: Any, out: Tensor, most: int | None = None) -> Tensor:
    """Return copies of results as (channels, positions), evenly spread if more than ``most``."""
    axis = -1 if isinstance(layer, nn.Linear) else out.dim() - layer.weight.dim() + 1
    rows = out.detach().movedim(axis, 0).flatten(1)
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


def _first_calls(
    fits: Mapping[str, _Fit], see: Callable[[_Fit, Any, Any, Tensor], Any]
) -> AbstractContextManager[None]:
    """Show the first call of each layer in a run; what ``see`` returns replaces the result."""
    seen: set[int] = set()

    def hook(fit: _Fit, args: Any, kwargs: Any, out: Tensor) -> Any:
        if id(fit) in seen:
            fit.repeated = True
            return None
        seen.add(id(fit))
        return see(fit, args, kwargs, out)

    return watching((fit.layer, partial(hook, fit)) for fit in fits.values())


def _step_of_own_errors(model: nn.Module, fits: Mapping[str, _Fit], call: Run) -> Run:
    """Return what adds a batch: each layer's own error, on what it reads in float."""
    known = list(quantizers(model).values())
    own = {id(fit): _quantizers_of(fit.layer) for fit in fits.values()}

    def see(fit: _Fit, args: Any, kwargs: Any, out: Tensor) -> None:
        layer = fit.layer
        with quantizing_only(known, own[id(fit)]):
            quantized = type(layer).forward(layer, *args, **kwargs)
        fit.add(_rows(layer, out), _rows(layer, quantized))

    def step(batch: Any) -> None:
        with quantizing_only(known), _first_calls(fits, see):
            call(batch)

    return step


def _step_in_order(model: nn.Module, fits: Mapping[str, _Fit], call: Run) -> Run:
    """Return what adds a batch in two runs: each layer is behind the corrected ones before it."""
    known = list(quantizers(model).values())

    def keep(fit: _Fit, args: Any, kwargs: Any, out: Tensor) -> None:
        fit.rows = _rows(fit.layer, out, _POSITIONS)

    def correct_result(fit: _Fit, args: Any, kwargs: Any, out: Tensor) -> Any:
        layer = fit.layer
        if fit.rows is None:
            return None
        # The layer has no correction while the fit runs: what it returns is what it adds up.
        fit.add(fit.rows, _rows(layer, out, _POSITIONS))
        fit.rows = None
        gain, shift = fit.solve()
        shape = [1] * out.dim()
        shape[-1 if isinstance(layer, nn.Linear) else out.dim() - layer.weight.dim() + 1] = -1
        out = out if gain is None else out * gain.to(out).view(shape)
        out = out + shift.to(out).view(shape)
        return layer.quantized_result(out, fit.of_results)

    def step(batch: Any) -> None:
        with quantizing_only(known), _first_calls(fits, keep):
            call(batch)
        with _first_calls(fits, correct_result):
            call(batch)

    return step


#: What stands for a batch on a rank that has none left, while others do.
_NONE = object()


def _batches_of_ranks(
    batches: Iterable[Any], group: dist.ProcessGroup | None, device: torch.device | None
) -> Iterator[Any]:
    """Yield the batches; in a group as often on each rank as on the one with the most."""
    if group is None:
        yield from batches
        return
    own = iter(batches)
    while True:
        batch = next(own, _NONE)
        left = torch.tensor(float(batch is not _NONE), device=device)
        dist.all_reduce(left, dist.ReduceOp.MAX, group=group)
        if not left:
            return
        yield batch


def _join(fits: Mapping[str, _Fit], group: dist.ProcessGroup | None) -> None:
    """Add the sums of the other ranks since the last call to those of this one."""
    if group is None:
        return
    for fit in fits.values():
        count, sums = fit.known
        channels = len(fit.layer.bias)
        own = torch.zeros(5 * channels + 1, dtype=torch.float64, device=fit.layer.weight.device)
        if fit.sums is not None:
            own[0] = fit.count - count
            own[1:] = (fit.sums - (0 if sums is None else sums)).flatten()
        dist.all_reduce(own, group=group)
        if own[0]:
            before = torch.zeros_like(own[1:]) if sums is None else sums.flatten()
            fit.count = count + float(own[0])
            fit.sums = (before + own[1:]).view(5, channels)
        fit.known = fit.count, fit.sums
