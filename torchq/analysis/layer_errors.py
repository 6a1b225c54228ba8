"""Where the error of a quantized model is born, and which layers only pass it on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchq.analysis.layers import (
    QuantizedLayer,
    active_quantizers,
    channel_axes,
    quantized_layers,
    quantizing,
)
from torchq.analysis.metrics import results_in
from torchq.analysis.noise import Noise, mean_ratio
from torchq.analysis.quantizer_statistics import QuantizerRow, QuantizerStatistics
from torchq.analysis.text import bar, decibel_text, percent_text
from torchq.errors import CalibrationError
from torchq.graph import Forward, call_model, state_kept, tensors_in
from torchq.nn import TensorQuantizer
from torchq.utils import (
    check_batches,
    device_of,
    evaluating,
    progress_bar,
    table,
    uncompiled,
    unwrapped,
)

#: Elements of an output that are compared in one batch; more of them change the figures little.
_SAMPLE = 1 << 18
#: Images that are compared at least, whatever their size.
_IMAGES = 4

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


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
        local_cosine: cosine between float and local output.
        cosine: cosine between float and quantized output.
        local_max_error: the largest local error of one element.
        max_error: the largest accumulated error of one element.
        born: power of the local error over that of the accumulated one. Near 1 and above, the
            error is born here; near 0, the layer passes on what others made.
        clipped: share of its input elements beyond the range, 0 to 1.
        quantizers: what each of its quantizers did.
    """

    name: str
    kind: str
    local_sqnr: float
    sqnr: float
    local_cosine: float
    cosine: float
    local_max_error: float
    max_error: float
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
    """

    rows: tuple[LayerError, ...]
    output_sqnr: float
    batches: int
    unseen: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The rows, those with the lowest local SQNR first: where error is born; NaN is lowest."""

        def ratio(row: LayerError) -> float:
            return -math.inf if math.isnan(row.local_sqnr) else row.local_sqnr

        return tuple(sorted(self.rows, key=lambda row: (ratio(row), row.name)))

    @property
    def first_not_finite(self) -> LayerError | None:
        """The first row whose layer returned NaN or infinity; None if none did."""
        return next((row for row in self.rows if math.isnan(row.sqnr + row.local_sqnr)), None)

    def _ending(self) -> str:
        worst, broken = self.worst[0], self.first_not_finite
        text = f"output {decibel_text(self.output_sqnr)}; "
        if broken is None:
            text += f"most error is born in {worst.name}"
            text += f" ({decibel_text(worst.local_sqnr)} by itself)"
        else:
            text += f"NaN or infinity comes first from {broken.name or '(root)'}: look at its "
            text += "weight, its bias and what it is given"
        return text + (f"; not reached: {', '.join(self.unseen)}" if self.unseen else "")

    def __str__(self) -> str:
        head = ("layer", "type", "local SQNR", "SQNR", "cosine", "born here", "clipped", "codes")
        rows: list[tuple[str, ...]] = [(*head, "dead")]
        for row in self.rows:
            codes = str(row.used_codes) if row.used_codes else ""
            figures = (decibel_text(row.local_sqnr), decibel_text(row.sqnr), f"{row.cosine:.5f}")
            rest = (bar(row.born, 10), percent_text(row.clipped), codes, str(row.dead_channels))
            rows.append((row.name or "(root)", row.kind, *figures, *rest))
        return f"{table(rows)}\n{self._ending()}"


@uncompiled()
def layer_errors(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    sample: int | None = _SAMPLE,
    progress: bool = True,
) -> LayerErrors:
    """Measure the error of every quantized layer, alone and with all that came before it.

    Each batch runs twice, once with all quantizers off and once with all on. During the first run
    each layer is also called by itself with its quantizers on. So the work is that of three passes
    at most; convolutions and linear layers with large outputs are called on a part of the batch.

    Args:
        model: quantized and calibrated; left unchanged. Without calibration the ranges are those
            of each call.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        sample: about how many elements of each output are compared in one batch, those of the
            first images or sequences, at least four of these. None compares all.
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
    where, model = "layer_errors", unwrapped(model)
    check_batches(where, batches, num_batches)
    layers = quantized_layers(model, where)
    measurement = _Measurement(layers, active_quantizers(model), sample)
    device = device_of(model)
    with torch.no_grad(), evaluating(model), state_kept(model):
        shown = progress_bar(batches, description=where, most=num_batches, enabled=progress)
        for batch in shown:
            measurement.run(partial(call_model, model, batch, forward=forward, device=device))
    return measurement.report()


@dataclass
class _Record:
    """What is known about one layer."""

    layer: QuantizedLayer
    statistics: dict[str, QuantizerStatistics]
    local: Noise = field(default_factory=Noise)
    accumulated: Noise = field(default_factory=Noise)
    expected: list[list[Tensor]] = field(default_factory=list)
    calls: int = 0


class _Measurement:
    """Float and quantized runs of one model; ``known`` are its quantizers that are on."""

    def __init__(
        self, layers: list[QuantizedLayer], known: list[TensorQuantizer], sample: int | None
    ) -> None:
        self.known, self.sample = known, sample
        self.records = [_Record(layer, _statistics(layer)) for layer in layers]
        self.order: list[_Record] = []
        self.outputs: dict[int, Noise] = {}
        self.batches = 0

    def run(self, call: Callable[[], Any]) -> None:
        """Run one batch: float, with each layer alone beside it, and then quantized."""
        with quantizing(self.known, []), self._hooked(self._after_float):
            expected = _copied(results_in(call()))
        with quantizing(self.known, self.known), self._hooked(self._after_quantized):
            found = results_in(call())
        for place, (value, reference) in enumerate(zip(found, expected, strict=False)):
            self.outputs.setdefault(place, Noise()).add(value, reference)
        for record in self.records:
            record.expected.clear()
        self.batches += 1

    @contextmanager
    def _hooked(self, hook: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for record in self.records:
                handle = _add_hook(record, hook)
                stack.callback(handle.remove)
            yield

    def _after_float(self, record: _Record, args: Any, kwargs: Any, output: Any) -> None:
        # Code behind the layer may change its output in place.
        expected = _copied(_compared(output, self.sample))
        record.expected.append(expected)
        if not record.calls:
            self.order.append(record)
        record.calls += 1
        own = record.layer.quantizers.values()
        if not kwargs:
            args = _part_of_call(record.layer, args, output, self.sample)
        with quantizing(own, own), _watched(record):
            # The forward itself: hooks, such as this one, have run around it.
            alone = record.layer.module.forward(*args, **kwargs)
        for value, reference in zip(_floats(alone), expected, strict=False):
            record.local.add(value[: len(reference)] if value.dim() else value, reference)

    def _after_quantized(self, record: _Record, args: Any, kwargs: Any, output: Any) -> None:
        if record.expected:
            found = _compared(output, self.sample)
            for value, reference in zip(found, record.expected.pop(0), strict=False):
                record.accumulated.add(value, reference)

    def report(self) -> LayerErrors:
        """Return the rows."""
        if not self.batches:
            raise CalibrationError("layer_errors: got no batch; expected at least one")
        if not self.order:
            raise CalibrationError(
                "layer_errors: no quantized layer was called; expected batches that reach one"
            )
        reached = {id(record) for record in self.order}
        unseen = tuple(r.layer.name for r in self.records if id(r) not in reached)
        rows = tuple(_row(record) for record in self.order)
        output = mean_ratio([(noise.signal, noise.noise) for noise in self.outputs.values()])
        return LayerErrors(rows, output, self.batches, unseen)


def _statistics(layer: QuantizedLayer) -> dict[str, QuantizerStatistics]:
    module = layer.module
    axes = channel_axes(module)
    input_axis = -1 if isinstance(module, nn.Linear) else 1
    found = {
        path: QuantizerStatistics(path, quantizer, axes.get(id(quantizer), (0,))[-1])
        for path, quantizer in layer.weights.items()
    }
    return {p: QuantizerStatistics(p, q, input_axis) for p, q in layer.inputs.items()} | found


def _add_hook(record: _Record, hook: Any) -> RemovableHandle:
    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        hook(record, args, kwargs, output)

    return record.layer.module.register_forward_hook(after, with_kwargs=True)


@contextmanager
def _watched(record: _Record) -> Iterator[None]:
    """Feed the statistics of a layer's quantizers while it is called; weights only once."""
    with ExitStack() as stack:
        for path, quantizer in record.layer.quantizers.items():
            if path in record.layer.weights and record.calls > 1:
                continue
            statistics = record.statistics[path]

            def after(
                module: nn.Module, args: Any, output: Any, statistics: Any = statistics
            ) -> None:
                statistics.add(args[0].detach(), output.detach())

            stack.callback(quantizer.register_forward_hook(after).remove)
        yield


def _floats(value: Any) -> list[Tensor]:
    return _compared(value, None)


def _copied(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _row(record: _Record) -> LayerError:
    local, accumulated = record.local, record.accumulated
    rows = {path: statistics.row() for path, statistics in record.statistics.items()}
    inputs = [rows[path].clipped for path in record.layer.inputs]
    born = local.noise / accumulated.noise if accumulated.noise else float(local.noise > 0)
    return LayerError(
        name=record.layer.name,
        kind=record.layer.kind,
        local_sqnr=local.sqnr,
        sqnr=accumulated.sqnr,
        local_cosine=local.cosine,
        cosine=accumulated.cosine,
        local_max_error=local.largest,
        max_error=accumulated.largest,
        born=born,
        clipped=max(inputs, default=0.0),
        quantizers=tuple(rows.values()),
    )


def _compared(value: Any, sample: int | None) -> list[Tensor]:
    """Return the part of each floating-point tensor that is compared, about ``sample`` elements."""
    floats = (tensor for tensor in tensors_in(value) if tensor.is_floating_point())
    return [tensor[: _leading(tensor, sample)] if tensor.dim() else tensor for tensor in floats]


def _leading(tensor: Tensor, sample: int | None) -> int:
    """Return how many of the first indices of a tensor hold about ``sample`` elements."""
    length = tensor.shape[0] if tensor.dim() else 1
    if sample is None or tensor.numel() <= sample:
        return length
    each = max(1, tensor.numel() // length)
    return min(length, max(_IMAGES, -(-sample // each)))


def _part_of_call(
    layer: QuantizedLayer, args: Sequence[Any], output: Any, sample: int | None
) -> Sequence[Any]:
    """Return arguments with which a layer computes the part of its output that is compared.

    Convolutions and linear layers treat every image by itself, so the first images give the first
    results. Other layers get all of their arguments, and so do those that take the range of each
    call.
    """
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return args
    if not _is_batched(layer.module, args[0]) or args[0].shape[0] != output.shape[0]:
        return args
    if any(q.descriptor.dynamic or not q.calibrated for q in layer.inputs.values()):
        return args
    return (args[0][: _leading(output, sample)], *args[1:])


def _is_batched(module: nn.Module, x: Tensor) -> bool:
    """Return True where the first dimension of the input of a module counts images."""
    if isinstance(module, nn.Linear):
        return x.dim() > 1
    return isinstance(module, _CONVOLUTIONS) and x.dim() == len(module.kernel_size) + 2
