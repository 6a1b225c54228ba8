"""``verify_onnx``: does a file compute what the model simulates?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError, TorchqError
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.nn import TensorQuantizer
from torchq.onnx.export import undo_export, unwrap
from torchq.onnx.interface import input_names_of, nested_tensors
from torchq.onnx.ir import (
    Node,
    first_line,
    input_at,
    is_constant,
    load_model,
    named_errors,
    readers,
    value_of,
)
from torchq.onnx.passes.convolutions import without_pads
from torchq.onnx.qdq import (
    float_weights,
    path_of,
    qparams_of,
    quantizer_nodes,
    read_record,
    weight_nodes,
)
from torchq.onnx.verify.amplified import too_different
from torchq.onnx.verify.forced import ForcedFile, layers_behind
from torchq.onnx.verify.metrics import Codes, LayerAgreement, Measure, Outputs, VerifyReport
from torchq.onnx.verify.simulation import Simulation, parameter_difference
from torchq.onnx.verify.weights import compare_weights
from torchq.runtime import open_session, reference_runtime
from torchq.utils import check_batches, evaluating, progress_bar
from torchq.workflow import quantizers


def verify_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    layers: bool = True,
    measure: Measure | None = None,
    progress: bool = True,
) -> VerifyReport:
    """Compare a file that :func:`torchq.export_onnx` wrote with its model, in ONNX Runtime.

    *Layer by layer*: the graph runs unoptimised, and every layer gets the model's own quantized
    values as input, so a difference is the doing of that layer. Codes may differ where a value
    lies on the border of two codes (a tie), because sums are added in another order. Scales, zero
    points, types and stored weights must be the model's own, or what a target derives from them
    (uint8 behind a ReLU, say); the model is then simulated with these.

    *End to end*: the file as it is, against that simulation and against the unaltered model; and
    with the optimisations that make it run on integers. These round biases to int32, so codes flip
    here and there. A file for ONNX Runtime also has to return with them what it does without.

    Args:
        model: The quantized model; run in eval mode, left as it was.
        path: The file.
        batches: Batches as for :func:`torchq.calibrate`; see :func:`torchq.graph.call_model`.
        num_batches: The number of batches to stop after.
        layers: Compare layer by layer as well.
        measure: The agreement of an output, as ``measure(expected, found)`` that returns numbers
            between 0 and 1; default top-1 for float outputs of shape (batch, classes).
        progress: Show a bar where it takes longer than a second.

    Returns:
        The agreement; ``print`` it, or ask ``report.ok``.

    Raises:
        ExportError: There is no batch, the file is broken or does not belong to this model, or
            ONNX Runtime cannot run it.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> torchq.verify_onnx(model, "model.onnx", test_batches).ok  # doctest: +SKIP
        True
    """
    model, path = unwrap(model), Path(path)
    check_batches("verify_onnx", batches, num_batches)
    with named_errors(path):
        file = _File(model, path, layers)
    runs = _Runs(path, measure)
    unaltered, count = Outputs(runs.plain.outputs, measure), 0
    shown = progress_bar(batches, description="verify", most=num_batches, enabled=progress)
    with torch.no_grad(), evaluating(model), file.simulation.active(model):
        for batch in shown:
            feeds = runs.plain.feeds(_file_inputs(model, batch))
            expected = file.simulated(model, batch)
            found = runs.add(feeds, expected, compare=file.for_reference)
            with named_errors(path):
                file.compare(feeds, expected)
            unaltered.add(file.as_it_is(model, batch, expected), found)
            count += 1
    if not count:
        raise ExportError("verify_onnx: got no batch; expected at least one")
    with named_errors(path):
        rows = file.rows(model)
    return VerifyReport(
        os.fspath(path),
        runs.exact.result(),
        unaltered.result(),
        () if runs.fast is None else runs.optimized.result(),
        rows,
        file.last_layers(),
        tuple(runs.misread),
    )


def _results(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the outputs of a model on a batch that fits its file."""
    try:
        return [t.cpu() for t in tensors_in(call_model(model, batch))]
    except TorchqError:
        raise
    except Exception as error:  # A model may raise anything.
        raise ExportError(
            f"verify_onnx: {type(model).__name__} fails on a batch that fits the file "
            f"({first_line(error)}); expected the model that was exported"
        ) from error


def _file_inputs(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names that a file has for them by default."""
    tensors = nested_tensors(model, *call_arguments(model, batch))
    return dict(zip(input_names_of(model, tensors), tensors.values(), strict=True))


class _Runs:
    """The runs of a file, as it is written and with ONNX Runtime's optimisations."""

    def __init__(self, path: Path, measure: Measure | None) -> None:
        self.plain, self.fast = open_session(path, optimize=False), _optimized(path)
        self.exact, self.optimized = (Outputs(self.plain.outputs, measure) for _ in range(2))
        self.misread: dict[str, None] = {}

    def add(
        self, feeds: Mapping[str, Tensor], expected: list[Tensor], *, compare: bool
    ) -> list[Tensor]:
        """Run both on one batch; return the outputs of the file as it is written."""
        found = self.plain.run(feeds)
        self.exact.add(expected, found)
        if self.fast is not None:
            results = self.fast.run(feeds)
            self.optimized.add(expected, results)
            wrong = too_different(results, found, self.plain.run, feeds) if compare else []
            self.misread.update((self.plain.outputs[number], None) for number in wrong)
        return found


def _optimized(path: Path) -> Any:
    """Return the file as ONNX Runtime optimises it; None where that fails, as with some FP8."""
    try:
        return open_session(path, optimize=True)
    except ExportError as error:
        warnings.warn(f"verify_onnx: {error}. Compared without optimisations", stacklevel=3)
        return None


class _File:
    """A file beside its model: the simulation, the forced run, and the counts of each layer."""

    def __init__(self, model: nn.Module, path: Path, layers: bool) -> None:
        self._graph = load_model(path)
        record = read_record(self._graph)
        self.for_reference = record.get("target") in (None, reference_runtime().name)
        # What a target added to layers is taken away: the rest must be the model's own.
        self._faults = undo_export(self._graph)
        known, stored = quantizers(model), quantizer_nodes(self._graph)
        self._weights, self._float_weights = weight_nodes(self._graph), float_weights(self._graph)
        off = _off_in_the_model(model, (*stored, *self._weights))
        self._faults |= dict.fromkeys(off, "is off in the model")
        self._nodes = {name: node for name, node in stored.items() if path_of(name) in known}
        self._merged = dict(record.get("merged", {}))
        self._folded = tuple(record.get("folded", ()))
        self._qparams = {name: qparams_of(node) for name, node in self._nodes.items()}
        self.simulation = Simulation(known, self._qparams, self._merged)
        self._forced: ForcedFile | None = None
        if not layers or not (self._nodes or set(self._weights) & set(known)):
            return
        self._forced = ForcedFile(path, list(self._nodes))
        weights = model.named_parameters(remove_duplicate=False)
        self._dtypes = {name.removesuffix(".weight"): weight.dtype for name, weight in weights}
        self._codes = {
            name: Codes(
                name,
                self._qparams[name].format.qmax,
                _pair_difference(known[path_of(name)], node),
                *self._computed_by(node.inputs[0]),
            )
            for name, node in self._nodes.items()
        }
        self._outputs = [
            Codes(f"output {value.name}", 0.0, "", *self._computed_by(value))
            for value in self._graph.graph.outputs
        ]

    def _computed_by(self, value: Any) -> tuple[tuple[str, ...], tuple[torch.dtype, ...]]:
        """Return the layers that compute a value, and the types of their weights."""
        layers = layers_behind(value)
        return layers, tuple({self._dtypes[name] for name in layers if name in self._dtypes})

    def simulated(self, model: nn.Module, batch: Any) -> list[Tensor]:
        """Return the outputs of the model with the types of the file."""
        self.simulation.start(as_in_file=True)
        return _results(model, batch)

    def as_it_is(self, model: nn.Module, batch: Any, simulated: list[Tensor]) -> list[Tensor]:
        """Return the outputs of the unaltered model; the simulated ones where they are the same."""
        if not self.simulation.derives:
            return simulated
        self.simulation.start(as_in_file=False)
        return _results(model, batch)

    def compare(self, feeds: Mapping[str, Tensor], expected: list[Tensor]) -> None:
        """Compare codes and outputs of one batch; the last run of the model must be its own."""
        if self._forced is None:
            return
        seen = self.simulation.seen
        absent = [name for name in self._forced.names if name not in seen]
        if absent:
            raise ExportError(
                f"{absent[0]}: is in the file but was not called in the model; "
                "expected the model that was exported"
            )
        in_file = {*self._codes, *self._weights, *self._float_weights, *self._folded}
        for name in self.simulation.called:
            if self._merged.get(name, name) not in in_file:
                self._faults[name] = "is not in the file"
        values = {name: self._unpadded(name, seen[name].values) for name in self._forced.names}
        codes, outputs = self._forced.run(feeds, values)
        for name, found in codes.items():
            scaled, wanted = (
                self._unpadded(name, t).cpu() for t in (seen[name].scaled, seen[name].codes)
            )
            dtype = seen[name].values.dtype
            self._codes[name].add(scaled, wanted, self._qparams[name].centered(found), dtype)
        for row, want, got in zip(self._outputs, expected, outputs, strict=True):
            row.add_output(want, got)

    def _unpadded(self, name: str, x: Tensor) -> Tensor:
        """Return what the model has at a quantizer without the zeros that the file adds later."""
        return without_pads(x, self._nodes[name].meta.get("pads", ()))

    def rows(self, model: nn.Module) -> tuple[LayerAgreement, ...]:
        """Return the agreement of each quantizer, the worst first."""
        if self._forced is None:
            return ()
        rows = [codes.result() for codes in self._codes.values()]
        rows += compare_weights(model, self._weights, self._float_weights)
        rows += [LayerAgreement(name, 0, 0, 0, 0, text) for name, text in self._faults.items()]
        return tuple(sorted(rows, key=LayerAgreement.badness, reverse=True))

    def last_layers(self) -> tuple[LayerAgreement, ...]:
        """Return the agreement of each output, computed from the model's own codes."""
        return () if self._forced is None else tuple(row.result() for row in self._outputs)


def _off_in_the_model(model: nn.Module, stored: tuple[str, ...]) -> list[str]:
    """Return the quantizers in a file that are not on in its model."""
    active = {name for name, quantizer in quantizers(model).items() if quantizer.quantizing}
    if not active and stored:
        raise ExportError(
            f"verify_onnx: {type(model).__name__} has no active quantizer, but the file is "
            "quantized; expected the quantized model that was exported"
        )
    # Other programs name their nodes in other ways.
    return [
        name
        for name in stored
        if path_of(name).endswith("quantizer") and path_of(name) not in active
    ]


def _pair_difference(quantizer: TensorQuantizer, quantize: Node) -> str:
    """Return what is wrong with the parameters of a Q/DQ pair; "" if nothing is."""
    found = qparams_of(quantize)
    text = parameter_difference(quantizer, found)
    if text:
        return text
    for node in readers(quantize.outputs[0]):
        if node.op_type != "DequantizeLinear":
            continue
        for index, what in ((1, "scale"), (2, "zero point")):
            if not _same_input(quantize, node, index):
                return f"QuantizeLinear and DequantizeLinear have different {what}s"
    return ""


def _same_input(one: Node, other: Node, index: int) -> bool:
    pair = [input_at(node, index) for node in (one, other)]
    if pair[0] is pair[1]:
        return True
    if not all(map(is_constant, pair)):
        return False
    first, second = map(value_of, pair)
    return first.dtype == second.dtype and torch.equal(first, second)
