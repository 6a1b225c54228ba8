"""``torchq.forecast``: does INT8 pay on a runtime? Measured before the work, without any data.

How fast a file is depends on which operators have codes, and hardly on what the codes are. So
ranges are taken from the example, nothing is corrected, and the file is timed beside the float one.
Calibration may leave operators beside layers in float; both ends are measured: all that the plan
allows, and the layers alone.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError, TorchqError
from torchq.fusion import fuse_
from torchq.graph import call_model
from torchq.lowering.api import simulated_copy
from torchq.nn import QuantModule
from torchq.onnx import export_onnx
from torchq.runtime import RUNTIMES, Runtime, runtime_of
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.timing import (
    Measurement,
    module_to_time,
    shapes_in_words,
    stored_size,
    time_modules,
)
from torchq.swap import Plan, quantize_
from torchq.swap.share import Share
from torchq.utils import bullets, copy_module, network_of, progress_bar, table
from torchq.utils.timing import Samples
from torchq.workflow import calibrate

log = logging.getLogger(__name__)

FLOAT = "float"
INT8 = "quantized"
LAYERS = "layers alone"
#: A gain below this is not worth the work of calibration and its loss.
_WORTH = 1.15
_REASONS = 3


@dataclass(frozen=True)
class TimedFile:
    """One form of the model on one runtime.

    Attributes:
        form: ``"float"``, ``"quantized"`` (all that the plan allows) or ``"layers alone"``, with
            the settings of the runtime behind it where it has several.
        samples: seconds of a call; None where there is a problem.
        bytes: of the file, or of a saved module where the runtime has none; 0 with a problem.
        problem: why the model does not run in this form; may be empty.
    """

    form: str
    samples: Samples | None
    bytes: int
    problem: str = ""

    @property
    def milliseconds(self) -> float:
        """The median; infinite where there is a problem."""
        return math.inf if self.samples is None else 1000 * self.samples.median

    @property
    def noise(self) -> float:
        """Half the distance of the quartiles, as a part of the median."""
        return 0.0 if self.samples is None else self.samples.noise


@dataclass(frozen=True)
class TargetForecast:
    """What is to be expected of one runtime.

    Attributes:
        target: its name.
        files: what was timed; empty for a runtime that is not here.
        share: how much of the model's multiply-adds is planned on integers; None if nothing is.
        problem: why there is no plan, or no file; may be empty.
        written: files for a runtime elsewhere.
        command: what times such a file there, with ``{file}`` for its name.
    """

    target: str
    files: tuple[TimedFile, ...] = ()
    share: Share | None = None
    problem: str = ""
    written: tuple[Path, ...] = ()
    command: str = "{file}"

    def best(self, *forms: str) -> TimedFile | None:
        """Return the fastest file of some forms that runs; None if there is none."""
        running = [
            f for f in self.files if f.samples is not None and f.form.startswith(forms)
        ]
        return min(running, key=lambda file: file.milliseconds, default=None)

    @property
    def gain(self) -> float:
        """The time of the float file over that of the fastest quantized one; NaN if unknown."""
        before = self.best(FLOAT)
        after = self.best(INT8, LAYERS)
        if before is None or after is None:
            return math.nan
        return before.milliseconds / after.milliseconds

    @property
    def noise(self) -> float:
        """How far :attr:`gain` may be off, as a part of it, by the quartiles of both times."""
        files = self.best(FLOAT), self.best(INT8, LAYERS)
        return math.hypot(*(file.noise for file in files if file is not None))

    @property
    def pays(self) -> bool:
        """True if a quantized file is faster than the float one by a gain that is worth it."""
        return self.gain >= max(_WORTH, 1 + self.noise)

    @property
    def verdict(self) -> str:
        """One clause: whether it pays, and what stands in the way."""
        if self.problem:
            return self.problem
        if not self.files:
            return self._unmeasured()
        if math.isnan(self.gain):
            problems = [file.problem for file in self.files if file.problem]
            return f"not measured: {problems[0]}"
        return f"{self._judgement()}{self._ends()}{self._obstacle()}"

    def _unmeasured(self) -> str:
        share = "nothing to quantize" if self.share is None else str(self.share)
        if not self.written:
            return f"not here; {share}"
        commands = [self.command.format(file=path) for path in self.written]
        return f"not here; {share}. Time it there: {'; '.join(commands)}"

    def _judgement(self) -> str:
        gain = self.gain
        if gain < 1 - self.noise:
            return f"{gain:.2g}x, stay in float"
        if gain < 1 + self.noise:
            return f"{gain:.2g}x, within noise: stay in float"
        if gain < _WORTH:
            return f"{gain:.2f}x, hardly worth it"
        return f"{gain:.2g}x"

    def _ends(self) -> str:
        """Say so where the operators beside the layers cost time."""
        everything = self.best(INT8)
        layers = self.best(LAYERS)
        if everything is None or layers is None:
            return ""
        ratio = everything.milliseconds / layers.milliseconds
        if ratio > 1 + math.hypot(everything.noise, layers.noise):
            return f"; by the layers alone (all that the plan allows takes {ratio:.2f} of that)"
        return ""

    def _obstacle(self) -> str:
        """Return what stays float, where it does not pay."""
        if self.pays or self.share is None or self.share.quantized > 0.9:
            return ""
        return f": {1 - self.share.quantized:.0%} of the {self.share.unit} stay float"


@dataclass(frozen=True)
class Forecast:
    """What :func:`torchq.forecast` found; ``print`` it.

    Attributes:
        targets: one for each runtime.
        example: the shapes of what was timed, in words.
        threads: of each call.
        seconds: that the forecast took.
    """

    targets: tuple[TargetForecast, ...]
    example: str
    threads: int
    seconds: float

    @property
    def fastest(self) -> tuple[str, TimedFile] | None:
        """The target and the form that were the fastest; None if nothing was measured."""
        files = [
            (t.target, f)
            for t in self.targets
            for f in t.files
            if f.samples is not None
        ]
        return min(files, key=lambda pair: pair[1].milliseconds, default=None)

    def __getitem__(self, target: str) -> TargetForecast:
        for forecast_of_target in self.targets:
            if forecast_of_target.target == target:
                return forecast_of_target
        names = ", ".join(repr(one.target) for one in self.targets)
        raise KeyError(f"Forecast: got {target!r}; expected one of {names}")

    def __str__(self) -> str:
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        rows = [("target", "form", "ms", "+-", "MB")]
        for one in self.targets:
            for file in one.files:
                rows.append((one.target, file.form, *_figures(file)))
        lines = [f"{one.target}: {one.verdict}" for one in self.targets]
        heading = f"one call of {self.example} on {threads}, ranges from the example"
        measured = [table(rows, heading)] if len(rows) > 1 else [heading]
        return "\n".join([*measured, bullets(lines), *self._reasons(), self._summary()])

    def _reasons(self) -> Iterator[str]:
        """Yield why work stays float, a line for each target that leaves some."""
        for one in self.targets:
            if one.share is None or not one.share.float_work:
                continue
            parts = list(one.share.float_work.items())
            shown = "; ".join(
                f"{part:.1%} {reason}" for reason, part in parts[:_REASONS]
            )
            more = (
                f"; and {len(parts) - _REASONS} more" if len(parts) > _REASONS else ""
            )
            yield f"float for {one.target}: {shown}{more}"

    def _summary(self) -> str:
        if self.fastest is None:
            return "nothing was measured: no runtime of these is here"
        target, file = self.fastest
        return f"fastest: {target}, {file.form}, {file.milliseconds:.3g} ms"


def _figures(file: TimedFile) -> tuple[str, str, str]:
    if file.problem:
        return "", "", file.problem.partition("\n")[0][:60]
    return f"{file.milliseconds:.3g}", f"{file.noise:.0%}", f"{file.bytes / 1e6:.3g}"


def forecast(
    model: nn.Module,
    example: object,
    targets: str | Runtime | Iterable[str | Runtime] | None = None,
    *,
    threads: int | None = None,
    folder: str | Path | None = None,
    progress: bool = True,
) -> Forecast:
    """Say whether INT8 pays on runtimes, by timing the files that they would get.

    Needs no data and no training: the time of a file does not depend on its ranges, which come
    from the example. Accuracy is not looked at. The model is left unchanged.

    Args:
        model: a float model. It is folded and quantized in a copy.
        example: arguments for one call of the model, see :func:`torchq.graph.call_model`. Their
            batch and their size are what is timed.
        targets: names of runtimes, or runtimes with settings; default: all whose kernels are here
            and whose time is that of the machine they are for.
        threads: that compute a call; default: those of ``torch.get_num_threads()``.
        folder: where to write files for runtimes that are not here, as ``TARGET.onnx`` and
            ``TARGET-float.onnx``, with the command that times them there. None writes nothing.
        progress: show a bar where it takes longer than a second.

    Returns:
        For each runtime the milliseconds of the float model, of all that the plan quantizes and of
        the layers alone (median, and half the distance of the quartiles), the sizes of the files,
        the share of multiply-adds on integers, what stays float and why, and a verdict.

    Raises:
        ConfigError: there is no such runtime, or no such folder, or the model is quantized already.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> found = torchq.forecast(model, torch.randn(1, 64), "torch", progress=False)
        >>> found["torch"].best("float").milliseconds < 100
        True
    """
    began = time.perf_counter()
    model = network_of(model)
    runtimes = _runtimes(targets)
    if quantized := [
        name for name, m in model.named_modules() if isinstance(m, QuantModule)
    ]:
        raise ConfigError(
            f"forecast: {quantized[0] or 'the model'}: is quantized; expected a float model. Call "
            "torchq.restore_ on a copy"
        )
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ConfigError(
            f"forecast: got threads={threads}; expected a whole number, at least 1"
        )
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"forecast: got folder={str(folder)!r}; expected a folder that is there"
        )
    with _threads(threads), warnings.catch_warnings():
        # What a file is warned of is said by the steps that make one to use.
        warnings.simplefilter("ignore")
        folded = copy_module(model).eval()
        fuse_(folded, example)
        drafts = [_Draft(runtime, folded, example) for runtime in runtimes]
        for draft in progress_bar(
            drafts, description="files", unit="target", enabled=progress
        ):
            draft.prepare(None if folder is None else Path(folder))
        modules = [module for draft in drafts for module in draft.modules.values()]
        samples = time_modules(modules, example, Measurement())
        results = tuple(draft.result(samples) for draft in drafts)
        count = torch.get_num_threads()
    return Forecast(
        results, shapes_in_words(example), count, time.perf_counter() - began
    )


def _runtimes(targets: str | Runtime | Iterable[str | Runtime] | None) -> list[Runtime]:
    if targets is None:
        return [
            r
            for r in RUNTIMES.values()
            if isinstance(r, Engine) and r.measured and r.here
        ]
    if isinstance(targets, (str, Runtime)):
        targets = [targets]
    runtimes = [runtime for runtime in map(runtime_of, targets) if runtime is not None]
    if not runtimes:
        raise ConfigError(
            "forecast: got no target; expected one of torchq.targets(), or None"
        )
    return runtimes


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


class _Draft:
    """The files of one runtime, while they are made and timed."""

    def __init__(self, runtime: Runtime, folded: nn.Module, example: Any) -> None:
        self.runtime = runtime
        self.folded = folded
        self.example = example
        self.plan: Plan | None = None
        self.problem = ""
        self.modules: dict[str, nn.Module] = {}
        self.problems: dict[str, str] = {}
        self.written: list[Path] = []

    @property
    def is_timed(self) -> bool:
        runtime = self.runtime
        return isinstance(runtime, Engine) and runtime.measured and runtime.here

    def prepare(self, folder: Path | None) -> None:
        """Plan, and make the files to time, or those to time elsewhere."""
        try:
            everything = self._quantized(())
        except TorchqError as error:
            self.problem = str(error)
            return
        if not self.is_timed:
            if folder is not None and self.runtime.file is not None:
                self._write(folder, everything)
            return
        self._build(INT8, everything, quantized=True)
        if beside := self._beside_layers():
            try:
                self._build(LAYERS, self._quantized(beside), quantized=True)
            except TorchqError as error:
                self.problems[LAYERS] = str(error)
        self._build(FLOAT, everything, quantized=False)

    def _quantized(self, excluded: Sequence[str]) -> nn.Module:
        """Return a copy with the layers, and the operators beside them that are not excluded."""
        twin = copy_module(self.folded)
        plan = quantize_(
            twin,
            target=self.runtime,
            example=self.example,
            exclude=list(excluded),
            check=False,
            progress=False,
        )
        if self.plan is None:
            self.plan = plan
        calibrate(
            twin, [self.example], correct=False, on_unseen="disable", progress=False
        )
        return twin

    def _beside_layers(self) -> list[str]:
        """Return the paths of what is quantized and has no weight."""
        assert self.plan is not None
        return [
            d.name
            for d in self.plan.replaced
            if d.weight is None and not d.is_container
        ]

    def _build(self, form: str, model: nn.Module, *, quantized: bool) -> None:
        assert isinstance(self.runtime, Engine)
        task = Task(simulated_copy(model), self.example, compares=False)
        engines = [e for e in self.runtime.candidates() if e.quantized is quantized]
        for engine in engines or [replace(self.runtime, quantized=quantized)]:
            label = form if len(engines) < 2 else f"{form}, {engine.label}"
            try:
                module = module_to_time(engine, task)
                call_model(module, self.example)
                self.modules[label] = module
            except Exception as error:  # a runtime may fail in any way it likes
                self.problems[label] = str(error) or type(error).__name__
                log.debug("%s, %s: %s", self.runtime.name, label, error)

    def _write(self, folder: Path, model: nn.Module) -> None:
        try:
            for path, network in (
                (folder / f"{self.runtime.name}.onnx", model),
                (folder / f"{self.runtime.name}-float.onnx", self.folded),
            ):
                export_onnx(network, self.example, path, target=self.runtime)
                self.written.append(path)
        except TorchqError as error:
            self.problem = str(error)

    def result(self, samples: Mapping[int, Samples]) -> TargetForecast:
        """Return the figures."""
        files = [
            TimedFile(form, samples[id(module)], stored_size(module))
            for form, module in self.modules.items()
        ]
        files += [
            TimedFile(form, None, 0, problem) for form, problem in self.problems.items()
        ]
        order = (FLOAT, INT8, LAYERS)
        files.sort(key=lambda file: order.index(file.form.partition(",")[0]))
        return TargetForecast(
            self.runtime.name,
            tuple(files),
            None if self.plan is None else self.plan.share,
            self.problem,
            tuple(self.written),
            self.runtime.timer or "{file}",
        )
