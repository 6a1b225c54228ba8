"""The runs: each batch in float, each layer alone beside it, and the whole model quantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchq.analysis.batches import gathered
from torchq.analysis.layer_errors.quantizer_statistics import Counts, QuantizerStatistics
from torchq.analysis.layer_errors.report import LayerError, LayerErrors
from torchq.analysis.layer_errors.sampling import compared, part_of_call
from torchq.analysis.layers import QuantizedLayer, channel_axes, quantizing
from torchq.analysis.noise import Noise, mean_ratio
from torchq.analysis.results import results_in
from torchq.errors import CalibrationError
from torchq.nn import TensorQuantizer

__all__ = ["Measurement"]


@dataclass
class _Record:
    """What is known about one layer."""

    layer: QuantizedLayer
    statistics: dict[str, QuantizerStatistics]
    local: Noise = field(default_factory=Noise)
    accumulated: Noise = field(default_factory=Noise)
    expected: list[list[Tensor]] = field(default_factory=list)
    calls: int = 0


@dataclass
class _Sums:
    """What one process measured, by path of the layer, in the order of the calls."""

    layers: dict[str, tuple[Noise, Noise, dict[str, Counts]]]
    outputs: dict[int, Noise]
    batches: int


class Measurement:
    """Float and quantized runs of one model, batch by batch.

    Args:
        layers: of the model.
        known: all quantizers that are on.
        sample: elements of each output that are compared in one batch; None compares all.
    """

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
        expected = _copied(compared(output, self.sample))
        record.expected.append(expected)
        if not record.calls:
            self.order.append(record)
        record.calls += 1
        own = record.layer.quantizers.values()
        if not kwargs:
            args = part_of_call(record.layer, args, output, self.sample)
        with quantizing(own, own), _watched(record):
            # The forward itself: hooks, such as this one, have run around it.
            alone = record.layer.module.forward(*args, **kwargs)
        for value, reference in zip(_floats(alone), expected, strict=False):
            record.local.add(value[: len(reference)] if value.dim() else value, reference)

    def _after_quantized(self, record: _Record, args: Any, kwargs: Any, output: Any) -> None:
        if record.expected:
            found = compared(output, self.sample)
            for value, reference in zip(found, record.expected.pop(0), strict=False):
                record.accumulated.add(value, reference)

    def join(self, group: dist.ProcessGroup | None) -> None:
        """Add what the other processes of a group measured."""
        layers = {
            r.layer.name: (r.local, r.accumulated, {p: s.counts for p, s in r.statistics.items()})
            for r in self.order
        }
        parts: list[_Sums] = gathered(_Sums(layers, self.outputs, self.batches), group)
        by_name = {record.layer.name: record for record in self.records}
        for record in self.records:
            record.local, record.accumulated = Noise(), Noise()
            for statistics in record.statistics.values():
                statistics.counts = Counts()
        self.outputs, self.batches, self.order = {}, 0, []
        for part in parts:
            for place, noise in part.outputs.items():
                self.outputs.setdefault(place, Noise()).join(noise)
            self.batches += part.batches
            for name, found in part.layers.items():
                self._add(by_name[name], *found)

    def _add(
        self, record: _Record, local: Noise, accumulated: Noise, counts: dict[str, Counts]
    ) -> None:
        if all(record is not known for known in self.order):
            self.order.append(record)
        record.local.join(local)
        record.accumulated.join(accumulated)
        for path, found in counts.items():
            record.statistics[path].counts.join(found)

    def report(self) -> LayerErrors:
        """Return the rows.

        Raises:
            CalibrationError: There was no batch, or none reached a layer.
        """
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
    return compared(value, None)


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
