"""``verify_onnx``: does a file compute what the model simulates?"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, ExportError, TorchqError
from torchq.formats import SCALE_TYPES, IntFormat
from torchq.functional import QParams
from torchq.graph import call_arguments, call_model, tensors_in
from torchq.graph.operators import BATCH_NORMS
from torchq.nn import TensorQuantizer, switched_off
from torchq.nn.convert import float_name
from torchq.nn.integer_bias import rounded_biases
from torchq.onnx.coverage import Coverage
from torchq.onnx.export import undo_export, unwrap
from torchq.onnx.interface import input_names_of, named_calls, nested_tensors
from torchq.onnx.ir import (
    Model,
    Node,
    first_line,
    float_size,
    load_model,
    named_errors,
    stored_size,
)
from torchq.onnx.passes.convolutions import without_pads
from torchq.onnx.qdq import (
    element_type,
    float_weights,
    path_of,
    qparams_of,
    quantizer_nodes,
    read_record,
    weight_nodes,
)
from torchq.onnx.traced_calls import other_values
from torchq.onnx.verify.cut import CutFile
from torchq.onnx.verify.exposed import (
    APPROXIMATE_SHARE,
    OTHER_SHARE,
    OTHER_SHARE_OF_FEW_BITS,
    SHARE,
    WIDE_SHARE,
    Behind,
    ExposedApart,
    ExposedFile,
    Ran,
    behind,
)
from torchq.onnx.verify.parameters import compare_weights, pair_difference
from torchq.onnx.verify.report import (
    Codes,
    LayerAgreement,
    Output,
    Verdict,
    VerifyReport,
    add_outputs,
    decibels,
    difference,
)
from torchq.onnx.verify.runs import Metric, RunAgreement, Runs
from torchq.onnx.verify.session import EQUAL, EQUAL_BUT_FOR_BIASES, unlike_written
from torchq.onnx.verify.sizes import Sizes
from torchq.runtime import (
    RUNTIMES,
    Runtime,
    open_session,
    planned_target,
    reference_runtime,
    runtime_of,
)
from torchq.swap.even_channels import as_in_files
from torchq.utils import (
    check_batches,
    evaluating,
    progress_bar,
    same_numbers,
    state_kept,
)
from torchq.workflow import quantizers
from torchq.workflow.changed_weights import warn_of_changed_weights
from torchq.workflow.modes import has_wide_weights

_FEW_BITS = 4
_BYTE = 8
#: In codes: four roundings of float32 of a value of 255 codes. Measured in OpenVINO: 1.5e-5.
_NEXT_TO_A_TIE = 2**-14
#: What to do where a model differs from itself.
_RANDOM_HINT = (
    "{} reads other values in a second run of the model on the same batch, as where a forward "
    "draws random numbers, so no file can be compared with it: let the forward take these numbers "
    "as an argument"
)
#: What to do where a chip computes something else than its file says.
_CHIP_HINT = (
    "the file computes what its model does, and the chip something else: write the layer in "
    "another form, give it other widths, or ask another chip"
)


def verify_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[object],
    *,
    num_batches: int | None = None,
    target: str | Runtime | None = None,
    metric: Metric | None = None,
    progress: bool = True,
) -> VerifyReport:
    """Prove that a file of :func:`torchq.export_onnx` computes what its model does, in its runtime.

    That is the one that the file is for, where it runs in this process, or else ONNX Runtime.

    *Parameters*: scales, zero points, codes of weights and biases of the file are the model's own,
    to the last bit.

    *Layers*: the file runs once and returns the codes of every quantizer, in a file for ONNX
    Runtime from the integer kernels that a session with default options has. Each layer of the
    model gets the file's own codes, so that a difference is the doing of that layer. One code in
    100,000, and three more, may be another one, by one: values beside a tie. Behind float kernels,
    averages and in another runtime it may be more: see ``allowed``.

    On CPUs without VNNI a session sets ``session.x64quantprecision``, else it would overflow.

    *The session of a user*, with the defaults of the runtime, is judged by its own codes where it
    has those of every quantizer, and else by its outputs beside those of the file as it is written:
    they may differ by twice what a change of the inputs by 3e-5 makes. Where they differ by more in
    another runtime than ONNX Runtime, its codes of the first such batch are compared, in sessions
    that show no neighbours, with the same bounds: a deep network turns one value at a tie into
    other results.

    *Open dimensions*: the first batch runs with a second length of each, where the float model
    accepts one.

    *An emulator*: with ``target="qnn"``, each layer also runs on the chip's emulator, given the
    codes that the file has in front of it; codes may be off by what
    ``torchq.runtimes.qnn.BOUNDS`` says. Whole results may be twice as far from the simulation as
    that is from the float model, and ``report.runs`` says how near all are.

    *Outputs*: a session with default options, against the model. A deep network turns one code at a
    tie into other outputs for that image, so these are figures and no verdict.

    Args:
        model: The quantized model; run in eval mode, left as it was.
        path: The file.
        batches: Batches as for :func:`torchq.calibrate`; see :func:`torchq.graph.call_model`.
        num_batches: The number of batches to stop after.
        target: The runtime that the file is for, or its name, perhaps with settings as in
            ``Qnn(soc="SM8650")``, to run its emulator too.
        metric: With ``target``, called as ``metric(output, batch)``: a number for each run, of
            which the report has the mean over batches.
        progress: Show a bar where it takes longer than a second.

    Returns:
        The agreement; ``print`` it, or ask ``report.ok`` and ``report.first``.

    Raises:
        ExportError: There is no batch, the file is broken or does not belong to this model, or
            ONNX Runtime or the emulator cannot run it.
        ConfigError: ``target`` is unknown, or the file is for another one.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> torchq.verify_onnx(model, "model.onnx", test_batches).ok  # doctest: +SKIP
        True
    """
    check_batches("verify_onnx", batches, num_batches)
    warn_of_changed_weights("verify_onnx", unwrap(model))
    shown = progress_bar(
        batches, description="verify", most=num_batches, enabled=progress
    )
    return _verified(
        unwrap(model),
        Path(path),
        shown,
        whole=True,
        progress=progress,
        runtime=runtime_of(target),
        metric=metric,
    )


def _has_numbers(batch: object) -> bool:
    """Return False for a batch of tensors without rows, where nothing can be compared."""
    sizes = [tensor.numel() for tensor in tensors_in(batch)]
    return not sizes or any(sizes)


def verify_layers(model: nn.Module, path: Path, batch: Any) -> VerifyReport:
    """Return what :func:`verify_onnx` says of one batch by the layers and results of the file.

    It tries no other lengths of dimensions, and does not look into the session of a user.
    """
    return _verified(unwrap(model), path, [batch], whole=False, progress=False)


def _verified(
    model: nn.Module,
    path: Path,
    batches: Iterable[Any],
    *,
    whole: bool,
    progress: bool,
    runtime: Runtime | None = None,
    metric: Metric | None = None,
) -> VerifyReport:
    with as_in_files(model), named_errors(path):
        comparison = _Comparison(
            model, path, whole=whole, progress=progress, runtime=runtime, metric=metric
        )
    sizes = Sizes(load_model(path, check=False), model)
    count = 0
    first: Any = None
    with (
        torch.no_grad(),
        evaluating(model),
        as_in_files(model) as as_in_model,
        ExitStack() as stack,
    ):

        def in_float(batch: Any) -> list[Tensor]:
            """Return the results of the float model."""
            with as_in_model(), switched_off(quantizers(model).values()):
                return _results(model, batch)

        for file in comparison.compared:
            stack.enter_context(named_calls(model, file.known, file.note))
        for batch in filter(_has_numbers, batches):
            comparison.add(batch, in_float)
            first = first if count else batch
            count += 1
        if not count:
            raise ExportError(
                "verify_onnx: got no batch; expected at least one with a row to compare"
            )
        verdicts, layers = comparison.verdicts(), comparison.layers()
        is_wrong = any(verdict.ok is False for verdict in verdicts)
        moved = _read_otherwise(model, first) if is_wrong else ""
        agreed = tuple(output.result() for output in comparison.outputs)
        if whole:
            sizes.run(first, comparison.problem_with)
    shown_file = comparison.shown()
    written = load_model(path, check=False)
    of_file = RUNTIMES.get(str(read_record(written).get("target")))
    return VerifyReport(
        path=os.fspath(path),
        outputs=agreed,
        layers=layers,
        session=shown_file.session,
        hint=_RANDOM_HINT.format(moved) if moved else shown_file.hint,
        verdicts=(*verdicts, *sizes.verdicts),
        coverage=Coverage.of(written, of_file),
        size=(stored_size(written), float_size(written)),
        simulation_db=_beside_float(model, first),
        runs=comparison.runs(),
    )


def _read_otherwise(model: nn.Module, batch: Any) -> str:
    """Return the first quantizer that reads other values in a second run; "" where none does."""
    known = quantizers(model)
    first: dict[str, Tensor] = {}
    moved: list[str] = []

    def keep(name: str, _: TensorQuantizer, x: Tensor, out: Tensor) -> Tensor:
        first[name] = x.clone()
        return out

    def compare(name: str, _: TensorQuantizer, x: Tensor, out: Tensor) -> Tensor:
        before = first.get(name)
        if before is None or not same_numbers(before, x):
            moved.append(name)
        return out

    with torch.random.fork_rng(devices=[]):
        for note in (keep, compare):
            with state_kept(model), named_calls(model, known, note):
                _results(model, batch)
    return moved[0] if moved else ""


def _beside_float(model: nn.Module, batch: Any) -> float | None:
    """Return how near the simulation is to the float model, in dB, at the worst output."""
    active = [
        quantizer for quantizer in quantizers(model).values() if quantizer.quantizing
    ]
    if not active:
        return None
    with torch.no_grad(), evaluating(model):
        simulated = _results(model, batch)
        with switched_off(quantizers(model).values()):
            in_float = _results(model, batch)
    found = []
    for want, got in zip(in_float, simulated, strict=True):
        if want.is_floating_point() and want.shape == got.shape and want.numel():
            signal = float(want[want.isfinite()].double().square().sum())
            found.append(decibels(signal, float(difference(want, got).square().sum())))
    return min(found, default=None)


class _Comparison:
    """A model beside its file: as it is written, and as the session of a user runs it."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        *,
        whole: bool,
        progress: bool,
        runtime: Runtime | None = None,
        metric: Metric | None = None,
    ) -> None:
        graph = load_model(path)
        self._model = model
        self._path = path
        self._whole = whole
        self._progress = progress
        self._has_integers = _has_integers(graph)
        # Quantizers that are off, as in torchq.disabled, leave a float model.
        self._quantizes = any(q.quantizing for q in quantizers(model).values())
        self._session, optimized = _default_session(
            path, "precision" in read_record(graph)
        )
        self.files = [_File(model, path, graph, optimized=False)]
        if optimized and self.files[0].is_for_reference:
            as_optimised = _File(model, path, load_model(path), optimized=True)
            self.dropped = as_optimised.dropped
            self.files += [] if self.dropped else [as_optimised]
        else:
            self.dropped = ()
        usual = self.files[0].usual_run()
        self._run = usual or self._session.run
        # Where weights overflow on this machine, a user has to set what this session has set.
        is_special = usual is None and has_wide_weights(model)
        self._settings = self._session.settings if is_special else ""
        # A file for another runtime than is here opens in a session that no user of it has.
        is_users = usual is not None or not self.files[0].is_for_another
        compares = optimized and is_users and len(self.files) == 1
        self._written = open_session(path, optimize=False) if compares else None
        self.outputs = [Output(name) for name in self._session.outputs]
        self._session_problem = ""
        self._apart: _File | None = None
        self._emulation: _Emulation | None = None
        if runtime is not None and self._is_emulated(runtime, usual is not None):
            self._emulation = _Emulation(
                model, path, runtime, self._session.outputs, metric
            )

    def _is_emulated(self, runtime: Runtime, runs_here: bool) -> bool:
        """Return whether an emulator is to run; an error if a runtime cannot run the file."""
        of_file = self.files[0].target
        if of_file != runtime.name:
            raise ConfigError(
                f"verify_onnx: got target={runtime.name!r} for {self._path}, a file for "
                f"{of_file or 'no target'}; expected one that export_onnx wrote for "
                f"{runtime.name!r}"
            )
        if not runtime.emulates and not runs_here and runtime != reference_runtime():
            raise ConfigError(
                f"verify_onnx: got target={runtime.name!r}, which runs no files here; expected a "
                "runtime with an emulator. Leave target= out: any file runs in "
                f"{reference_runtime().name}"
            )
        return bool(runtime.emulates)

    @property
    def compared(self) -> list[_File]:
        """All files with codes of each quantizer, that on an emulator the last."""
        emulation = self._emulation
        return self.files if emulation is None else [*self.files, emulation.layers]

    def shown(self) -> _File:
        """Return the first file with a layer that differs, or else the last one."""
        looked_into = [] if self._apart is None else [self._apart]
        files = [*self.files, *looked_into]
        files += [] if self._emulation is None else [self._emulation.layers]
        wrong = (file for file in files if not all(row.ok for row in file.rows()))
        return next(wrong, files[-1])

    def runs(self) -> tuple[RunAgreement, ...]:
        """Return how near all runs are to each other; empty without an emulator."""
        return () if self._emulation is None else self._emulation.runs.results()

    def add(self, batch: object, in_float: Callable[[Any], list[Tensor]]) -> None:
        """Compare one batch; ``in_float`` returns the results of the float model."""
        feeds = self._session.feeds(_file_inputs(self._model, batch))
        results = self._run(feeds)
        add_outputs(self.outputs, _results(self._model, batch), results)
        self._compare(batch, feeds, results)
        if self._emulation is not None:
            self._emulation.add(self._model, batch, feeds, in_float(batch))

    def _compare(
        self, batch: object, feeds: Mapping[str, Tensor], found: list[Tensor]
    ) -> None:
        with named_errors(self._path):
            for file in self.files:
                file.compare(self._model, batch, feeds)
        if self._written is None or self._session_problem:
            return
        most = EQUAL if self.files[0].is_for_reference else EQUAL_BUT_FOR_BIASES
        self._session_problem = unlike_written(self._written.run, feeds, found, most)
        looks_closer = (
            self._whole
            and self.files[0].is_for_another
            and self._verdict_on_file().ok is True
        )
        if self._session_problem and looks_closer:
            self._look_into_session(batch, feeds)

    def _look_into_session(self, batch: object, feeds: Mapping[str, Tensor]) -> None:
        """Compare every code of the session that a user opens."""
        shown: ExposedApart | None = None
        for _ in range(2):
            graph = load_model(self._path)
            file = _File(self._model, self._path, graph, optimized=False)
            shown = file.show_apart(shown, progress=self._progress)
            with (
                named_errors(self._path),
                named_calls(self._model, file.known, file.note),
            ):
                file.compare(self._model, batch, feeds)
            self._apart = file
            wrong = file.quantizers_that_differ()
            if not wrong:
                return
            # A second time with what differs in sessions of its own.
            shown.show_alone(wrong)

    def problem_with(self, batch: object) -> str:
        """Return what is wrong with the results for another batch; "" where nothing new is."""
        if any(verdict.ok is False for verdict in self.verdicts()):
            return ""
        feeds = self._session.feeds(_file_inputs(self._model, batch))
        results = self._run(feeds)
        expected = _results(self._model, batch)
        add_outputs([Output(name) for name in self._session.outputs], expected, results)
        self._compare(batch, feeds, results)
        return next((v.reason for v in self.verdicts() if v.ok is False), "")

    def layers(self) -> tuple[LayerAgreement, ...]:
        """Return the layers of the chip or the user's session, or of the file if they are wrong."""
        return self.shown().rows()

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdict on the file, that on the session of a user, and those on a chip."""
        on_chip = () if self._emulation is None else self._emulation.verdicts()
        return self._verdict_on_file(), self._verdict_on_session(), *on_chip

    def _verdict_on_file(self) -> Verdict:
        rows = self.files[0].rows()
        if rows:
            return Verdict(self.files[0].session, *_agreement(rows))
        if self._quantizes and not self._has_integers:
            reason = "the model is quantized, and the file has no integers"
            return Verdict("the file as it is written", False, reason)
        results = [output.result() for output in self.outputs]
        wrong = next((str(output) for output in results if not output.ok), "")
        return Verdict("the file as it is written", not wrong, wrong)

    def _verdict_on_session(self) -> Verdict:
        what = f"the session that a user opens{self._settings}"
        if len(self.files) > 1:
            return Verdict(what, *_agreement(self.files[1].rows()))
        if self._written is None:
            return Verdict(
                what, None, "the runtime of the file is not here, or cannot optimise it"
            )
        reason = self._session_problem
        if self._apart is not None:
            ok, difference_of_a_layer = _agreement(self._apart.rows())
            why = (
                difference_of_a_layer or "every layer agrees: values at ties, amplified"
            )
            return Verdict(what, ok, f"{reason}; {why}")
        if reason and self.dropped:
            names = ", ".join(self.dropped[:3])
            reason += (
                f"; it has no codes of {names}, whose layers it computes in another way"
            )
        return Verdict(what, not reason, reason)


class _Emulation:
    """A file on the emulator of a chip: each layer alone, and the whole of it."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        runtime: Runtime,
        outputs: Sequence[str],
        metric: Metric | None,
    ) -> None:
        self._run = runtime.emulated(path)
        graph = load_model(path)
        self.layers = _File(model, path, graph, optimized=False, chip=runtime)
        self._written = open_session(path, optimize=False)
        self.runs = Runs(outputs, ("file on this CPU", runtime.emulates), metric)

    def add(
        self,
        model: nn.Module,
        batch: Any,
        feeds: Mapping[str, Tensor],
        in_float: list[Tensor],
    ) -> None:
        """Run one batch, of which ``in_float`` are the results of the float model."""
        self.layers.compare(model, batch, feeds)
        structure = call_model(model, batch)
        simulated = [tensor.cpu() for tensor in tensors_in(structure)]
        in_file = self._written.run(feeds)
        results = [in_float, simulated, in_file, self._run(feeds)]
        self.runs.add(batch, structure, results)

    def verdicts(self) -> tuple[Verdict, ...]:
        """Return the verdicts on the layers, and on the whole file."""
        rows = self.layers.rows()
        of_layers = Verdict(self.layers.session, *_agreement(rows))
        return (*((of_layers,) if rows else ()), self.runs.verdict())


def _agreement(rows: Iterable[LayerAgreement]) -> tuple[bool, str]:
    first = next((row for row in rows if not row.ok), None)
    return first is None, "" if first is None else first.why()


def _has_integers(graph: Model) -> bool:
    """Return True if a node of a file quantizes or computes on integers."""
    parts = ("Quantize", "QLinear", "Integer", "MatMulNBits", "QGemm", "QAttention")
    return any(part in node.op_type for node in graph.graph for part in parts)


def _default_session(path: Path, typed: bool) -> tuple[Any, bool]:
    """Return the file as ONNX Runtime optimises it, or, as with some FP8, as it is written.

    It cannot optimise some that are strongly typed, which are for other runtimes.
    """
    try:
        return open_session(path, optimize=True), True
    except ExportError as error:
        session = open_session(path, optimize=False)
        if typed:
            return session, False
        warnings.warn(
            f"verify_onnx: {error}. Compared without optimisations", stacklevel=3
        )
        return session, False


def _results(model: nn.Module, batch: object) -> list[Tensor]:
    """Return the outputs of a model on a batch that fits its file."""
    try:
        return [t.cpu() for t in tensors_in(call_model(model, batch))]
    except TorchqError:
        raise
    except Exception as error:  # A model may raise anything.
        raise ExportError(
            f"verify_onnx: {float_name(model)} fails on a batch that fits the file "
            f"({first_line(error)}); expected the model that was exported"
        ) from error


def _file_inputs(model: nn.Module, batch: object) -> dict[str, Tensor]:
    """Return the tensors of a batch by the names that a file has for them by default."""
    tensors = nested_tensors(model, *call_arguments(model, batch))
    return dict(zip(input_names_of(model, tensors), tensors.values(), strict=True))


class _File:
    """A file beside its model: what it stores, and its codes for one batch after the other."""

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        graph: Model,
        *,
        optimized: bool,
        chip: Runtime | None = None,
    ) -> None:
        record = read_record(graph)
        self._chip = chip
        self._path = path
        self._optimized = optimized
        self._runtime = RUNTIMES.get(str(record.get("target")))
        self._typed = SCALE_TYPES.get(str(record.get("precision")))
        # What a target added to layers is taken away: the rest must be the model's own.
        self._faults = undo_export(graph)
        self.known, stored = quantizers(model), quantizer_nodes(graph)
        in_file = {*weight_nodes(graph), *float_weights(graph)}
        off = _off_in_the_model(model, (*stored, *in_file))
        self._faults |= dict.fromkeys(off, "is off in the model")
        nodes = {
            name: node for name, node in stored.items() if path_of(name) in self.known
        }
        self._pads = {name: node.meta.get("pads", ()) for name, node in nodes.items()}
        self._qparams = {name: qparams_of(node) for name, node in nodes.items()}
        self._merged = dict(record.get("merged", {}))
        self._in_file = {*nodes, *in_file, *record.get("folded", ())}
        self._named = bool(nodes or in_file & set(self.known))
        with rounded_biases(model):
            self._stored = [*compare_weights(model, graph)]
        weights = model.named_parameters(remove_duplicate=False)
        dtypes = {
            name.removesuffix(".weight"): weight.dtype for name, weight in weights
        }
        places = {name: name for name in nodes}
        # Each place of the model counts for itself.
        places |= {
            name: other for name, other in self._merged.items() if other in nodes
        }
        behind_places = {
            name: self._behind(model, nodes[in_file])
            for name, in_file in places.items()
        }
        self._interpolated = {
            name for name, found in behind_places.items() if found.interpolates
        }
        self._codes = {
            name: Codes(
                name,
                pair_difference(self.known[path_of(name)], nodes[in_file]),
                behind_places[name],
                dtypes,
            )
            for name, in_file in places.items()
        }
        outputs = graph.graph.outputs
        ends = ((v.name, self._in_file_type(behind(v))) for v in outputs)
        self._outputs = [Codes(f"output {name}", "", end, dtypes) for name, end in ends]
        self._nodes = nodes
        self._exposed: ExposedFile | ExposedApart | CutFile
        if chip is None:
            self._exposed = ExposedFile(path, nodes, self._runtime, optimized=optimized)
        else:
            written = ExposedFile(path, nodes, None, optimized=False)
            self._exposed = CutFile(path, list(nodes), written, chip)
            self._outputs = []
        self.session = self._exposed.session
        self.dropped = self._exposed.dropped
        self._model = model
        self._ran: Ran | None = None
        self._called: dict[str, None] = {}
        # Calls on one batch that have no pair in the file.
        self._lost: set[str] = set()
        self._damages_lost = False

    @property
    def hint(self) -> str:
        """Say what to do where something differs."""
        if self._chip is not None:
            return _CHIP_HINT
        wrong = [row for row in self.rows() if not row.ok]
        is_stored = bool(self._faults) or any(not row.ok for row in self._stored)
        first = wrong[0] if wrong else None
        return _hint(self._model, self._runtime, self._path, first, is_stored=is_stored)

    def show_apart(self, shown: ExposedApart | None, *, progress: bool) -> ExposedApart:
        """Show codes in sessions that are like those of a user, ``shown`` or new ones."""
        assert self._runtime is not None
        if shown is None:
            shown = ExposedApart(
                self._path, self._nodes, self._runtime, progress=progress
            )
        self._exposed = shown
        self.session = shown.session
        return shown

    def quantizers_that_differ(self) -> list[str]:
        """Return the quantizers of the file whose codes differ by more than is allowed."""
        wrong = (name for name, codes in self._codes.items() if not codes.result().ok)
        return list(dict.fromkeys(self._merged.get(name, name) for name in wrong))

    def usual_run(self) -> Callable[[Mapping[str, Tensor]], list[Tensor]] | None:
        """Return the file in the other runtime that it is for; None where that is not here."""
        return (
            self._runtime.opened(self._path)
            if self.is_for_another and self._runtime
            else None
        )

    @property
    def target(self) -> str:
        """The name of the runtime that the file is for; empty for none."""
        return "" if self._runtime is None else self._runtime.name

    @property
    def is_for_reference(self) -> bool:
        """True for a file whose layers the reference runtime optimises."""
        return self._runtime is reference_runtime()

    @property
    def is_for_another(self) -> bool:
        """True for a file for another runtime than the reference."""
        return self._runtime not in (None, reference_runtime())

    def _behind(self, model: nn.Module, quantize: Node) -> Behind:
        """Return what computes codes; layers that the plan knows in float have their share."""
        value = quantize.inputs[0]
        if self._chip is not None:
            bound = self._chip.bound(quantize)
            layers = behind(value).layers
            return Behind(layers, bound.share, steps=bound.steps)
        share = self._share()
        if element_type(quantize).bitwidth > _BYTE:
            share = max(share, WIDE_SHARE)
        behind_value = behind(value, share)
        modules = dict(model.named_modules())
        forms = {
            name: getattr(module, "bias_format", "int32")
            for name, module in modules.items()
        }
        plans = any(getattr(module, "bias_format", "") for module in modules.values())
        if plans and not all(forms.get(name, "int32") for name in behind_value.layers):
            behind_value = replace(
                behind_value, share=max(behind_value.share, APPROXIMATE_SHARE)
            )
        # What a strongly typed file is given is float32.
        is_given = value.producer() is None
        return behind_value if is_given else self._in_file_type(behind_value)

    def _in_file_type(self, found: Behind) -> Behind:
        """Return what computes a value in a strongly typed file, with its type."""
        return found if self._typed is None else replace(found, dtype=self._typed.dtype)

    def _share(self) -> float:
        """Return the share of codes that the runtime may have others of."""
        widths = [q.descriptor.format.bits for q in self.known.values() if q.quantizing]
        few = min(widths, default=8) <= _FEW_BITS
        if self.is_for_another:
            return OTHER_SHARE_OF_FEW_BITS if few else OTHER_SHARE
        # A file as it is written has float kernels, in the reference too.
        return APPROXIMATE_SHARE if few or not self._optimized else SHARE

    def compare(
        self, model: nn.Module, batch: object, feeds: Mapping[str, Tensor]
    ) -> None:
        """Compare the codes of one batch, and the outputs behind the last of them."""
        if not self._named:
            return
        self._ran = self._exposed.run(feeds)
        self._lost = set()
        outputs = self._ran.outputs
        try:
            expected = _results(model, batch)
        finally:
            self._ran = None
        if self._lost and self._is_read(model, batch):
            self._faults |= dict.fromkeys(self._lost, "is not in the file")
        absent = [name for name in self._codes if name not in self._called]
        if absent:
            raise ExportError(
                f"{absent[0]}: is in the file but was not called in the model; "
                "expected the model that was exported"
            )
        if self._outputs:
            add_rows = zip(self._outputs, expected, outputs, strict=True)
            for row, want, got in add_rows:
                row.add_output(want, got)

    def _is_read(self, model: nn.Module, batch: object) -> bool:
        """Return True if the outputs depend on the calls that the file lacks.

        torch leaves out what nothing reads, such as the sum of a last block that hands on another
        value. So what these calls return is replaced by other values, which leave the outputs as
        they are where nothing reads them.
        """
        expected = _results(model, batch)
        self._damages_lost = True
        try:
            damaged = _results(model, batch)
        finally:
            self._damages_lost = False
        pairs = zip(expected, damaged, strict=True)
        return not all(torch.equal(*pair) for pair in pairs)

    def note(
        self, name: str, quantizer: TensorQuantizer, x: Tensor, out: Tensor
    ) -> Tensor:
        """Compare the codes of one call with the file's, and return the values of these."""
        if self._damages_lost and name in self._lost:
            return other_values(out)
        if self._ran is None:
            return out
        self._called[name] = None
        if not quantizer.quantizing:
            return out
        in_file = self._merged.get(name, name)
        if in_file not in self._in_file and name not in self._faults:
            self._lost.add(name)
        if in_file not in self._qparams:
            return out
        x = quantizer.scaled(x)
        model_codes = quantizer.codes(x).float()
        pads = self._pads[in_file]
        file_qparams = self._qparams[in_file]
        if not quantizer.descriptor.symmetric:
            model_codes = quantizer.qparams().centered(model_codes)
        file_codes = file_qparams.centered(self._ran.given[in_file])
        model_codes = without_pads(model_codes, pads).cpu()
        if in_file != name and model_codes.shape != file_codes.shape:
            return out  # Of two that became one, the model pads in front of one alone.
        if in_file in self._ran.computed:
            computed = file_qparams.centered(self._ran.computed[in_file])
            at_tie = None
            # The reference rounds as the model does, but adds in its own order between neighbours.
            # A chip has bounds of its own.
            adds_otherwise = self.is_for_another or name in self._interpolated
            if adds_otherwise and self._chip is None:
                at_tie = without_pads(at_ties(x, quantizer.qparams()), pads).cpu()
            self._codes[name].add(model_codes, computed, x.dtype, at_tie)
        values = out.clone()  # The zeros that only the model pads with stay.
        without_pads(values, pads).copy_(file_qparams.dequantize(file_codes))
        return values

    def rows(self) -> tuple[LayerAgreement, ...]:
        """Return all that was compared, in the order of the model."""
        if not self._named:
            return ()
        rows = [*self._stored, *(codes.result() for codes in self._codes.values())]
        rows += [
            LayerAgreement(name, 0, 0, 0, 0, fault)
            for name, fault in self._faults.items()
        ]
        places = {name: place for place, name in enumerate(self._called)}
        for name, place in list(places.items()):  # A bias comes with its weight.
            places.setdefault(f"{name.removesuffix('weight_quantizer')}bias", place)
        rows.sort(key=lambda row: places.get(row.name, len(places)))
        return (*rows, *(row.result() for row in self._outputs))


def at_ties(x: Tensor, qparams: QParams) -> Tensor:
    """Return where values lie halfway between two codes, as means of four codes of a scale do."""
    if not isinstance(qparams.format, IntFormat):
        return torch.zeros_like(x, dtype=torch.bool)
    steps = x.double() / qparams.aligned(qparams.scale, x).double()
    return ((steps - steps.floor()) - 0.5).abs() < _NEXT_TO_A_TIE


def _hint(
    model: nn.Module,
    runtime: Runtime | None,
    path: Path,
    first: LayerAgreement | None,
    *,
    is_stored: bool,
) -> str:
    """Return what to do where a file differs: why, then the lines that do it.

    Args:
        model: of the file.
        runtime: that the file is for.
        path: of the file.
        first: the first row that differs; None where it is something else.
        is_stored: what the file stores differs.
    """
    excuse = (runtime or reference_runtime()).excuse()
    if excuse and has_wide_weights(model):
        return excuse
    export = f"torchq.export_onnx(model, batches[0], {os.fspath(path)!r})"
    if runtime is not None and planned_target(model) != runtime.name:
        again = _quantized_again(f"target={runtime.name!r}")
        return (
            f"the model was not quantized for {runtime.name}, whose files have other codes and "
            f"biases\n{again}; {export}"
        )
    if any(isinstance(module, BATCH_NORMS) for module in model.modules()):
        return (
            "runtimes fold a BatchNorm into the weight in front of it, and quantize that anew; "
            f"fuse_ keeps the codes\ntorchq.fuse_(model.eval(), batches[0]); {export}"
        )
    if first is None:
        return ""
    if is_stored or first.parameters or not first.layers:
        return f"the file holds another state of the model\n{export}"
    planned = "" if runtime is None else f"target={runtime.name!r}, "
    again = _quantized_again(f"{planned}exclude={list(first.layers)}")
    return (
        "the file or its runtime computes this layer in another way: write the file anew, and if "
        f"it differs again, leave the layer in float\n{export}\n{again}; {export}"
    )


def _quantized_again(arguments: str) -> str:
    """Return the lines that quantize a model anew."""
    quantize = f"torchq.quantize_(model, {arguments}, example=batches[0])"
    return f"torchq.restore_(model); {quantize}; torchq.calibrate(model, batches)"


def _off_in_the_model(model: nn.Module, stored: tuple[str, ...]) -> list[str]:
    """Return the quantizers in a file that are not on in its model."""
    active = {
        name for name, quantizer in quantizers(model).items() if quantizer.quantizing
    }
    if not active and stored:
        raise ExportError(
            f"verify_onnx: {float_name(model)} has no active quantizer, but the file is "
            "quantized; expected the quantized model that was exported"
        )
    # Other programs name their nodes in other ways.
    return [
        name
        for name in stored
        if path_of(name).endswith("quantizer") and path_of(name) not in active
    ]
