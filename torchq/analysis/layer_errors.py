"""Where the error of a quantized model is born, which layers pass it on, and what quantizers do."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq import utils
from torchq.analysis.layers import (
    QuantizedLayer,
    active_quantizers,
    channel_axes,
    quantized_layers,
)
from torchq.analysis.outputs import (
    Noise,
    bar,
    decibel_text,
    mean_ratio,
    percent_text,
)
from torchq.errors import CalibrationError
from torchq.fusion.modules import is_layer
from torchq.graph import Forward, call_model, floats_in, results_in
from torchq.nn import TensorQuantizer, switched_off, switched_on
from torchq.nn.integer_kernel import kernels_off
from torchq.swap import plan_of
from torchq.workflow.two_versions import computing_alone_in_float

#: Elements of one call whose codes are counted; more of them change little.
_COUNTED = 1 << 16
#: Operators beside layers are worse than these where they cost so many dB at the output.
_WORSE = 3.0
#: Of more layers, those are printed that cost the most.
_SCREEN = 20


@dataclass(frozen=True)
class QuantizerRow:
    """What one quantizer did to the values that it saw.

    Attributes:
        name: its dotted path.
        descriptor: format, granularity and method, as text.
        amax: the smallest and the largest amax; None where each call has a range of its own.
        sqnr: signal to noise ratio of the quantized tensor itself, in dB.
        clipped: share of the elements beyond the largest or smallest value of the format, 0 to 1.
        used_codes: distinct codes that occurred, counted on a sample of large tensors.
        codes: codes that the format has; 0 where they cannot be counted.
        dead_channels: channels that hold nothing but 0 after quantization, though not before.
        channels: channels in all.
    """

    name: str
    descriptor: str
    amax: tuple[float, float] | None
    sqnr: float
    clipped: float
    used_codes: int
    codes: int
    dead_channels: int
    channels: int


@dataclass
class QuantizerStatistics:
    """Statistics of one quantizer over the calls that it sees; tensors have channels on an axis.

    ``lost`` marks channels of which only zeros are left, ``silent`` those that were zeros before;
    ``silent`` is None until a channel is lost.
    """

    name: str
    quantizer: TensorQuantizer
    channel_axis: int
    noise: Noise = field(default_factory=Noise)
    elements: int = 0
    clipped: int = 0
    codes: set[float] = field(default_factory=set)
    lost: Tensor | None = None
    silent: Tensor | None = None

    def add(self, x: Tensor, quantized: Tensor) -> None:
        """Add one call: what the quantizer was given, and what it returned."""
        if not x.numel():
            return
        x = self.quantizer.scaled(x)
        self.noise.add(quantized, x)
        self.elements += x.numel()
        descriptor = self.quantizer.descriptor
        has_grid = not descriptor.dynamic and descriptor.block_size is None
        if has_grid and self.quantizer.calibrated:
            scale = self.quantizer.calculate_qparams()[0]
            scale = descriptor.granularity.align(scale, x.shape).to(x.dtype)
            self.clipped += self._count_clipped(x, quantized, scale)
            self.codes.update(self._sample_codes(quantized, scale))
        if x.dim() > 1:
            axis = self.channel_axis % x.dim()
            self.lost = _both(self.lost, _only_zeros(quantized, axis))
            if bool(self.lost.any()):
                self.silent = _both(self.silent, _only_zeros(x, axis))

    def _count_clipped(self, x: Tensor, quantized: Tensor, scale: Tensor) -> int:
        """Return how many values lie beyond the grid."""
        format = self.quantizer.descriptor.format
        if format.is_integer:  # What moved by more than half a scale was clipped.
            return int(((x - quantized).abs_() > scale * 0.51).sum())
        return int((x.abs() > scale * format.qmax).sum())

    def _sample_codes(self, quantized: Tensor, scale: Tensor) -> list[float]:
        codes = (quantized / scale).reshape(-1)
        codes = codes[:: max(1, codes.numel() // _COUNTED)].float()
        if not self.quantizer.descriptor.format.is_integer:
            return torch.unique(codes).tolist()
        codes = codes.nan_to_num().round_().int()
        lowest = int(codes.min())
        return (torch.bincount(codes - lowest).nonzero().flatten() + lowest).tolist()

    def row(self) -> QuantizerRow:
        """Return what was seen."""
        descriptor = self.quantizer.descriptor
        lost = self.lost
        silent = self.silent
        amax = None
        if self.quantizer.calibrated and not descriptor.dynamic:
            smallest, largest = torch.aminmax(self.quantizer.amax.detach())
            amax = (float(smallest), float(largest))
        return QuantizerRow(
            name=self.name,
            descriptor=str(descriptor),
            amax=amax,
            sqnr=self.noise.sqnr,
            clipped=self.clipped / self.elements if self.elements else 0.0,
            used_codes=len(self.codes),
            codes=len(descriptor.format.values) if self.codes else 0,
            dead_channels=0
            if lost is None or silent is None
            else int((lost & ~silent).sum()),
            channels=0 if lost is None else lost.numel(),
        )


def _both(known: Tensor | None, new: Tensor) -> Tensor:
    """Return what holds in both; a tensor of another shape begins anew."""
    return new if known is None or known.shape != new.shape else known & new


def _only_zeros(x: Tensor, axis: int) -> Tensor:
    """Return for each index of ``axis`` whether all of its elements are 0."""
    dims = tuple(d for d in range(x.dim()) if d != axis)
    return (x.amax(dims) == 0) & (x.amin(dims) == 0)


_WHERE = "layer_errors"
#: Elements of an output that are compared in one batch; more of them change the figures little.
_SAMPLE = 1 << 18
#: Images that are compared at least, whatever their size.
_IMAGES = 4


@dataclass(frozen=True)
class LayerError:
    """The error of one layer.

    The *local* error is that of the layer alone, with the input of the float model. The
    *accumulated* error is that of its output in the quantized model, with all that came before.

    Attributes:
        name: its dotted path.
        kind: its float class.
        local_sqnr: signal to noise ratio of the local error, in dB.
        sqnr: signal to noise ratio of the accumulated error, in dB.
        cosine: cosine between float and quantized output.
        born: power of the local error over that of the accumulated one. Near 1 and above, the
            error is born here; near 0, the layer passes on what others made.
        clipped: share of its input elements beyond the range, 0 to 1.
        quantizers: what each of its quantizers did.
    """

    name: str
    kind: str
    local_sqnr: float
    sqnr: float
    cosine: float
    born: float
    clipped: float
    quantizers: tuple[QuantizerRow, ...]

    @property
    def used_codes(self) -> int:
        """The fewest distinct codes that one of its quantizers used; 0 where none was counted."""
        return min((q.used_codes for q in self.quantizers if q.codes), default=0)

    @property
    def dead_channels(self) -> int:
        """Channels of its tensors that quantization made 0."""
        return sum(q.dead_channels for q in self.quantizers)


@dataclass(frozen=True)
class LayerErrors:
    """The errors of all layers, in the order in which the model calls them; ``print`` it.

    Attributes:
        rows: one for each layer that was called.
        output_sqnr: signal to noise ratio of the outputs of the model, in dB.
        batches: how many were run.
        unseen: layers that no batch reached.
        layers_alone: :attr:`output_sqnr` of the first batch with all operators beside layers, such
            as additions, in float; None where there are none.
        first_batch: the same with them quantized.
    """

    rows: tuple[LayerError, ...]
    output_sqnr: float
    batches: int
    unseen: tuple[str, ...] = ()
    layers_alone: float | None = None
    first_batch: float | None = None

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The rows, those with the lowest local SQNR first: where error is born; NaN is lowest."""

        def ratio(row: LayerError) -> float:
            return -math.inf if math.isnan(row.local_sqnr) else row.local_sqnr

        return tuple(sorted(self.rows, key=lambda row: (ratio(row), row.name)))

    @property
    def first_not_finite(self) -> LayerError | None:
        """The first row whose layer returned NaN or infinity; None if none did."""
        return next(
            (row for row in self.rows if math.isnan(row.sqnr + row.local_sqnr)), None
        )

    def _ending(self) -> str:
        worst = self.worst[0]
        broken = self.first_not_finite
        ending = f"output {decibel_text(self.output_sqnr)}; "
        if broken is None:
            local = decibel_text(worst.local_sqnr)
            ending += f"most error is born in {worst.name} ({local} by itself)"
        else:
            ending += (
                f"NaN or infinity comes first from {broken.name or '(root)'}: look at its "
                "weight, its bias and what it is given"
            )
        ending += f"; {self._remark}" if self._remark else ""
        return ending + (
            f"; not reached: {', '.join(self.unseen)}" if self.unseen else ""
        )

    @property
    def _remark(self) -> str:
        """Return what operators beside layers cost at the output, which no row shows."""
        alone, together = self.layers_alone, self.first_batch
        if alone is None or together is None or not alone - together > _WORSE:
            return ""
        return (
            "a row looks at its layer alone, and an operator beside layers is worse: with all "
            f"of these in float the output of the first batch has {decibel_text(alone)} in "
            f"place of {decibel_text(together)}. torchq.calibrate(model, batches) with its "
            "correction leaves the worst in float; torchq.sensitivity ranks them"
        )

    def __str__(self) -> str:
        """Return the rows of the :attr:`worst` layers, in the order of the model."""
        if len(self.rows) <= _SCREEN:
            return self.table()
        shown = {row.name for row in self.worst[:_SCREEN]}
        rows = [row for row in self.rows if row.name in shown]
        rest = f"{len(rows)} of {len(self.rows)} layers, with the lowest local SQNR"
        return f"{self._table(rows)}\n{rest}; report.table() has all"

    def table(self) -> str:
        """Return a row for each layer."""
        return self._table(self.rows)

    def _table(self, layers: Sequence[LayerError]) -> str:
        head = (
            "layer",
            "type",
            "local SQNR",
            "SQNR",
            "cosine",
            "born here",
            "clipped",
            "codes",
        )
        rows: list[tuple[str, ...]] = [(*head, "dead")]
        for row in layers:
            codes = str(row.used_codes) if row.used_codes else ""
            figures = (
                decibel_text(row.local_sqnr),
                decibel_text(row.sqnr),
                f"{row.cosine:.5f}",
            )
            details = (
                bar(row.born, 10),
                percent_text(row.clipped),
                codes,
                str(row.dead_channels),
            )
            rows.append((row.name or "(root)", row.kind, *figures, *details))
        return utils.table(rows, self._ending())


@utils.uncompiled()
def layer_errors(
    model: nn.Module,
    batches: Iterable[object],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> LayerErrors:
    """Measure the error of every quantized layer, alone and with all that came before it.

    Each batch runs twice, once with all quantizers off and once with all on. During the first run
    each layer is also called by itself with its quantizers on. So the work is that of three passes
    at most. Of large outputs the first images or sequences are compared, at least four.

    Args:
        model: quantized and calibrated; left unchanged. Without calibration the ranges are those
            of each call.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        progress: show a bar.

    Returns:
        A row for each layer; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer that is on, or ``batches`` is no iterable of them.
        CalibrationError: There was no batch, or no layer was called.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> report = torchq.quantize_(model)
        >>> errors = torchq.layer_errors(model, [torch.ones(1, 4)], progress=False)
        >>> [row.name for row in errors.rows]
        ['0', '1']
    """
    model = utils.network_of(model)
    model = utils.unwrapped(model)
    utils.check_batches(_WHERE, batches, num_batches)
    measurement = _Measurement(model)
    device = utils.device_of(model)
    with utils.untouched(model):
        shown = utils.progress_bar(
            batches, description=_WHERE, most=num_batches, enabled=progress
        )
        for batch in shown:
            measurement.run(
                partial(call_model, model, batch, forward=forward, device=device)
            )
    return measurement.report()


class _Record:
    """What is known about one layer, which enters ``order`` when it is called first."""

    def __init__(self, layer: QuantizedLayer, order: list["_Record"]) -> None:
        self.layer = layer
        self.calls = 0
        self.order = order
        self.local, self.accumulated = Noise(), Noise()
        self.expected: list[list[Tensor]] = []  # the float outputs of the running batch
        axes = channel_axes(layer.module)
        input_axis = -1 if isinstance(layer.module, nn.Linear) else 1
        self.statistics = {
            path: QuantizerStatistics(
                path,
                q,
                axes.get(id(q), (0,))[-1] if path in layer.weights else input_axis,
            )
            for path, q in layer.quantizers.items()
        }

    def after_float(self, args: Sequence[Any], kwargs: Any, output: object) -> None:
        """Call the layer by itself as well, on the same arguments."""
        # Code behind the layer may change its output in place.
        expected = [tensor.clone() for tensor in _compared(output)]
        self.expected.append(expected)
        if not self.calls:
            self.order.append(self)
        self.calls += 1
        layer_quantizers = self.layer.quantizers.values()
        if not kwargs:
            args = _part_of_call(self.layer, args, output)
        with (
            switched_on(layer_quantizers),
            utils.watching(self._watched()),
        ):
            # The forward itself: hooks, such as this one, have run around it.
            alone = self.layer.module.forward(*args, **kwargs)
        for value, reference in zip(floats_in(alone), expected, strict=False):
            self.local.add(value[: len(reference)] if value.dim() else value, reference)

    def after_quantized(self, args: object, kwargs: object, output: object) -> None:
        """Compare the output with that of the float model."""
        if self.expected:
            for value, reference in zip(
                _compared(output), self.expected.pop(0), strict=False
            ):
                self.accumulated.add(value, reference)

    def _watched(self) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        """Yield what feeds the statistics of the quantizers; those of weights only once."""

        def add(
            statistics: QuantizerStatistics, args: Any, kwargs: object, output: Tensor
        ) -> None:
            statistics.add(args[0].detach(), output.detach())

        for path, quantizer in self.layer.quantizers.items():
            if path not in self.layer.weights or self.calls == 1:
                yield quantizer, partial(add, self.statistics[path])

    def row(self) -> LayerError:
        """Return what was measured."""
        local, accumulated = self.local, self.accumulated
        rows = {path: statistics.row() for path, statistics in self.statistics.items()}
        born = (
            local.noise / accumulated.noise
            if accumulated.noise
            else float(local.noise > 0)
        )
        return LayerError(
            name=self.layer.name,
            kind=self.layer.kind,
            local_sqnr=local.sqnr,
            sqnr=accumulated.sqnr,
            cosine=accumulated.cosine,
            born=born,
            clipped=max(
                (rows[path].clipped for path in self.layer.inputs), default=0.0
            ),
            quantizers=tuple(rows.values()),
        )


class _Measurement:
    """Float and quantized runs of one model."""

    def __init__(self, model: nn.Module) -> None:
        self.active = active_quantizers(model)
        # The records in the order in which their layers were called first.
        self.order: list[_Record] = []
        self.records = [
            _Record(layer, self.order) for layer in quantized_layers(model, _WHERE)
        ]
        self.outputs: dict[int, Noise] = {}
        self.batches = 0
        self.layers_alone: float | None = None
        self.first_batch: float | None = None
        # Operators beside layers: no weight of theirs is quantized.
        self.operators = [
            model.get_submodule(d.name)
            for d in plan_of(model).replaced
            if d.input is not None and d.weight is None
        ]
        self.model = model

    def run(self, call: Callable[[], object]) -> None:
        """Run one batch: float, with each layer alone beside it, and then quantized."""
        start = utils.RandomState.now()
        watched = [(r.layer.module, r.after_float) for r in self.records]
        with switched_off(self.active), utils.watching(watched):
            expected = [tensor.clone() for tensor in results_in(call())]
        start.restore()  # Both draw the same random numbers.
        compared = [(r.layer.module, r.after_quantized) for r in self.records]
        with switched_on(self.active), utils.watching(compared):
            quantized = results_in(call())
        for place, (value, reference) in enumerate(
            zip(quantized, expected, strict=False)
        ):
            self.outputs.setdefault(place, Noise()).add(value, reference)
        for record in self.records:
            record.expected.clear()
        if self.operators and not self.batches:
            start.restore()
            self._look_beside_layers(call, quantized, expected)
        self.batches += 1

    def _look_beside_layers(
        self,
        call: Callable[[], object],
        quantized: list[Tensor],
        expected: list[Tensor],
    ) -> None:
        """Run the first batch with the operators beside layers in float."""
        with (
            switched_on(self.active),
            computing_alone_in_float(self.operators),
            kernels_off(self.model),
        ):
            alone = results_in(call())
        self.first_batch = _ratio(quantized, expected)
        self.layers_alone = _ratio(alone, expected)

    def report(self) -> LayerErrors:
        """Return the rows."""
        if not self.batches:
            raise CalibrationError(f"{_WHERE}: got no batch; expected at least one")
        if not self.order:
            raise CalibrationError(
                f"{_WHERE}: no quantized layer was called; expected batches that reach one"
            )
        unseen = tuple(r.layer.name for r in self.records if not r.calls)
        rows = tuple(record.row() for record in self.order)
        output = mean_ratio(
            [(noise.signal, noise.noise) for noise in self.outputs.values()]
        )
        return LayerErrors(
            rows, output, self.batches, unseen, self.layers_alone, self.first_batch
        )


def _ratio(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the mean signal to noise ratio of results, in dB."""
    noises = []
    for result, reference in zip(results, expected, strict=False):
        noise = Noise()
        noise.add(result, reference)
        noises.append((noise.signal, noise.noise))
    return mean_ratio(noises)


def _compared(value: object) -> list[Tensor]:
    """Return the part of each floating-point tensor that is compared."""
    return [
        tensor[: _leading(tensor)] if tensor.dim() else tensor
        for tensor in floats_in(value)
    ]


def _leading(tensor: Tensor) -> int:
    """Return how many of the first indices of a tensor hold about ``_SAMPLE`` elements."""
    length = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() <= _SAMPLE:
        return length
    each = max(1, tensor.numel() // length)
    return min(length, max(_IMAGES, -(-_SAMPLE // each)))


def _part_of_call(
    layer: QuantizedLayer, args: Sequence[object], output: object
) -> Sequence[object]:
    """Return the first images where a layer treats each by itself, else all arguments."""
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return args
    if not _is_batched(layer.module, args[0]) or args[0].shape[0] != output.shape[0]:
        return args
    if any(q.descriptor.dynamic or not q.calibrated for q in layer.inputs.values()):
        return args
    return (args[0][: _leading(output)], *args[1:])


def _is_batched(module: nn.Module, x: Tensor) -> bool:
    """Return True where the first dimension of the input of a module counts images."""
    if isinstance(module, nn.Linear):
        return x.dim() > 1
    return is_layer(module) and x.dim() == len(module.kernel_size) + 2
