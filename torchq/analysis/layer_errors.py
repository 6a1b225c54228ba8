"""Where the error of a quantized model is born, and which layers only pass it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchq.analysis.batches import checked_batches
from torchq.analysis.layers import QuantizedLayer, active_quantizers, quantized_layers, quantizing
from torchq.analysis.noise import Noise
from torchq.analysis.quantizer_statistics import QuantizerRow, QuantizerStatistics
from torchq.analysis.tables import bar, decibel_text, html_table, percent_text, plain_number
from torchq.errors import CalibrationError
from torchq.graph import Forward, call_model, state_kept, tensors_in
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import device_of, evaluating, progress_bar, table

__all__ = ["LayerError", "LayerErrors", "layer_errors"]


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
        """The rows, those with the lowest local SQNR first: where error is born."""
        return tuple(sorted(self.rows, key=lambda row: (row.local_sqnr, row.name)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON data; None stands for what is infinite or not a number."""
        return _plain(asdict(self))

    def _cells(self) -> list[tuple[str, ...]]:
        head = ("layer", "type", "local SQNR", "SQNR", "cosine", "born here", "clipped", "codes")
        rows: list[tuple[str, ...]] = [(*head, "dead")]
        for row in self.rows:
            codes = str(row.used_codes) if row.used_codes else ""
            figures = (decibel_text(row.local_sqnr), decibel_text(row.sqnr), f"{row.cosine:.5f}")
            rest = (bar(row.born, 10), percent_text(row.clipped), codes, str(row.dead_channels))
            rows.append((row.name or "(root)", row.kind, *figures, *rest))
        return rows

    def _ending(self) -> str:
        worst = self.worst[0]
        text = f"output {decibel_text(self.output_sqnr)}; most error is born in {worst.name}"
        text += f" ({decibel_text(worst.local_sqnr)} by itself)"
        return text + (f"; not reached: {', '.join(self.unseen)}" if self.unseen else "")

    def __str__(self) -> str:
        return f"{table(self._cells())}\n{self._ending()}"

    def _repr_html_(self) -> str:
        return html_table(self._cells(), self._ending())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return plain_number(value) if isinstance(value, float) else value


def layer_errors(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> LayerErrors:
    """Measure the error of every quantized layer, alone and with all that came before it.

    Each batch runs twice, once with all quantizers off and once with all on. During the first run
    each layer is also called by itself with its quantizers on. So the work is that of three passes.

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
    where = "layer_errors"
    stream = checked_batches(where, batches, num_batches)
    measurement = _Measurement(quantized_layers(model, where), active_quantizers(model))
    device, count = device_of(model), 0
    with torch.no_grad(), evaluating(model), state_kept(model):
        shown = progress_bar(
            islice(stream, num_batches), description=where, total=stream.total, enabled=progress
        )
        for batch in shown:
            measurement.run(lambda b=batch: call_model(model, b, forward=forward, device=device))
            count += 1
    if not count:
        raise CalibrationError(f"{where}: got no batch; expected at least one")
    return measurement.report(count)


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
    """Float and quantized runs of one model, batch by batch."""

    def __init__(self, layers: list[QuantizedLayer], known: list[TensorQuantizer]) -> None:
        self.known = known
        self.records = [_Record(layer, _statistics(layer)) for layer in layers]
        self.order: list[_Record] = []
        self.output = Noise()

    def run(self, call: Any) -> None:
        """Run one batch: float, with each layer alone beside it, and then quantized."""
        with quantizing(self.known, []), self._hooked(self._after_float):
            expected = _floats(call(), copy=True)
        with quantizing(self.known, self.known), self._hooked(self._after_quantized):
            found = _floats(call())
        for value, reference in zip(found, expected, strict=False):
            self.output.add(value, reference)
        for record in self.records:
            record.expected.clear()

    @contextmanager
    def _hooked(self, hook: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for record in self.records:
                handle = _add_hook(record, hook)
                stack.callback(handle.remove)
            yield

    def _after_float(self, record: _Record, args: Any, kwargs: Any, output: Any) -> None:
        expected = _floats(output, copy=True)
        record.expected.append(expected)
        if not record.calls:
            self.order.append(record)
        record.calls += 1
        own = record.layer.quantizers.values()
        with quantizing(own, own), _watched(record):
            # The forward itself: hooks, such as this one, have run around it.
            alone = _floats(record.layer.module.forward(*args, **kwargs))
        for value, reference in zip(alone, expected, strict=False):
            record.local.add(value, reference)

    def _after_quantized(self, record: _Record, args: Any, kwargs: Any, output: Any) -> None:
        if record.expected:
            for value, reference in zip(_floats(output), record.expected.pop(0), strict=False):
                record.accumulated.add(value, reference)

    def report(self, count: int) -> LayerErrors:
        if not self.order:
            raise CalibrationError(
                "layer_errors: no quantized layer was called; expected batches that reach one"
            )
        unseen = tuple(r.layer.name for r in self.records if not r.calls)
        return LayerErrors(
            tuple(_row(record) for record in self.order), self.output.sqnr, count, unseen
        )


def _statistics(layer: QuantizedLayer) -> dict[str, QuantizerStatistics]:
    module = layer.module
    weight_axis = module.channel_axis if isinstance(module, QuantModule) else 0
    input_axis = -1 if isinstance(module, nn.Linear) else 1
    found = {p: QuantizerStatistics(p, q, weight_axis) for p, q in layer.weights.items()}
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


def _floats(value: Any, *, copy: bool = False) -> list[Tensor]:
    """Return the floating-point tensors in a value; copies, where later code may overwrite them."""
    found = [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
    return [tensor.clone() for tensor in found] if copy else found


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
