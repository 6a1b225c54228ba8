"""Checks of torchq on one network, each independent of the others.

A check gets a :class:`Subject` and returns the fields of its result. Its verdict is ``"ok"`` or a
short text that says what is wrong; a check that raises has the error as its verdict.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from benchmarks.zoo_measures import (
    class_of_each_path,
    count,
    outputs,
    same,
    state,
    with_rounding,
    worst_decibels,
)
from benchmarks.zoo_models import Entry, build, call

Fields = dict[str, Any]
# Exported or deployed against the simulation. Another order of additions changes results by about
# 1e-6, which flips codes that lie between two, and each flip makes more of them. So the simulation
# is compared with itself as well, with results of layers changed that much. That flips other codes,
# hence the margin. A flipped code in every tensor leaves about 35 dB.
MARGIN_DB = 10.0
ENOUGH_DB = 35.0
FLOAT_FAILS = "the float file fails too"


class Subject:
    """A network by name, and the models that several checks share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entry: Entry = build(name)
        self.model = self.entry.model
        self.exporter = ""
        self._folder = tempfile.TemporaryDirectory()
        self.path = Path(self._folder.name) / "int8.onnx"

    @cached_property
    def expected(self) -> list[Tensor]:
        """The outputs of the float model for the example."""
        return outputs(self.model, self.entry.example)

    @cached_property
    def fused(self) -> nn.Module:
        """A fused copy of the float model."""
        model = copy.deepcopy(self.model)
        torchq.fuse_(model, self.entry.example)
        return model

    @cached_property
    def quantized(self) -> nn.Module:
        """A calibrated copy, quantized without a target."""
        return self.calibrated(target=None)

    @cached_property
    def targeted(self) -> nn.Module:
        """A calibrated copy, quantized for ONNX Runtime."""
        return self.calibrated(target="onnxruntime")

    @cached_property
    def deployed(self) -> nn.Module:
        """The copy for ONNX Runtime on integer kernels, which :func:`check_deploy` compares."""
        return torchq.deploy(self.targeted, self.entry.example, check=False)

    @cached_property
    def session(self) -> Any:
        """ONNX Runtime with the exported copy."""
        self.exporter = _export(
            lambda dynamo: torchq.export_onnx(
                self.targeted,
                self.entry.example,
                self.path,
                target="onnxruntime",
                dynamo=dynamo,
            )
        )
        return _session(self.path)

    @cached_property
    def agreement_db(self) -> float:
        """The least agreement with the simulation that rounding explains, in dB."""
        expected = outputs(self.targeted, self.entry.example)
        ratios = [
            worst_decibels(
                with_rounding(self.targeted, self.entry.example, seed), expected
            )
            for seed in range(3)
        ]
        return min(ENOUGH_DB, min(ratios) - MARGIN_DB)

    def calibrated(self, target: str | None) -> nn.Module:
        """Return a fused copy, quantized for a target and calibrated on the example."""
        model = copy.deepcopy(self.fused)
        example = self.entry.example if target else None
        torchq.quantize_(model, target=target, example=example)
        torchq.calibrate(
            model, [self.entry.example], progress=False, on_unseen="disable"
        )
        return model


# --- the checks ----------------------------------------------------------------------------------


def verdict(good: bool, problem: str) -> str:
    """Return ``"ok"`` or the problem."""
    return "ok" if good else problem


def check_plan(subject: Subject) -> Fields:
    """Check that ``plan`` leaves the model alone, with and without a target."""
    _ = subject.expected  # some networks cache something in their first forward
    before = state(subject.model)
    torchq.plan(subject.model)
    torchq.plan(subject.model, target="onnxruntime")
    after = state(subject.model)
    changed = [
        key for key in before.keys() | after.keys() if before.get(key) != after.get(key)
    ]
    return {"plan": verdict(not changed, f"changed {', '.join(sorted(changed)[:3])}")}


def check_quantize(subject: Subject) -> Fields:
    """Check that quantizing works, and count the products with weights that it leaves float."""
    model = copy.deepcopy(subject.model)
    total = count(model, lambda: call(model, subject.entry.example)).total
    report = torchq.quantize_(model)
    torchq.calibrate(
        model, [subject.entry.example], progress=False, on_unseen="disable"
    )
    still_float = count(model, lambda: call(model, subject.entry.example)).floating
    modules = dict(model.named_modules())
    weighted = [
        decision
        for decision in report.skipped
        if decision.name in modules
        and any(p.dim() > 1 for p in modules[decision.name].parameters(recurse=False))
    ]
    reasons = {decision.name: decision.reason for decision in weighted}
    results = outputs(model, subject.entry.example)
    finite = all(bool(x.isfinite().all()) for x in results if x.is_floating_point())
    return {
        "quantize": verdict(finite, "not finite"),
        "products": total,
        "left_float": len(still_float),
        "left_shapes": sorted(set(still_float)),
        "left_reasons": reasons,
        "db": worst_decibels(results, subject.expected),
    }


def check_off(subject: Subject) -> Fields:
    """Check that disabled quantizers give float's bits, at other sizes and in train mode too."""
    model = copy.deepcopy(subject.model)
    torchq.quantize_(model)
    batches = [subject.entry.example]
    if subject.entry.other is not None:
        batches.append(subject.entry.other)
    problems = []
    for number, batch in enumerate(batches):
        with torchq.disabled(model):
            if not same(outputs(model, batch), outputs(subject.model, batch)):
                problems.append("another size" if number else "the example")
    try:
        expected = outputs(copy.deepcopy(subject.model).train(), batches[-1])
    except Exception:  # a detector wants targets in train mode
        expected = None
    if expected is not None:
        with torchq.disabled(model.train()):
            if not same(outputs(model, batches[-1]), expected):
                problems.append("train mode")
    return {"off": verdict(not problems, f"differs on {', '.join(problems)}")}


def check_restore(subject: Subject) -> Fields:
    """Check that ``restore_`` gives back classes and bits, after placing operators for a target."""
    model = copy.deepcopy(subject.targeted)
    torchq.restore_(model)
    good = class_of_each_path(model) == class_of_each_path(subject.fused)
    example = subject.entry.example
    equal = same(outputs(model, example), outputs(subject.fused, example))
    return {
        "restore": verdict(good and equal, "bits differ" if good else "classes differ")
    }


def check_save(subject: Subject) -> Fields:
    """Check that a file loads into a freshly built float model and gives the same bits."""
    model = subject.quantized
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        torchq.save(model, path)
        fresh = torchq.load(build(subject.name).model, path).eval()
    example = subject.entry.example
    equal = same(outputs(fresh, example), outputs(model, example))
    return {"save": verdict(equal, "bits differ")}


def check_fuse(subject: Subject) -> Fields:
    """Check that fusing changes the float outputs by rounding only."""
    model = copy.deepcopy(subject.model)
    report = torchq.fuse_(model, subject.entry.example)
    ratio = worst_decibels(outputs(model, subject.entry.example), subject.expected)
    return {"fuse": verdict(ratio > 60, f"{ratio} dB"), "fused": len(report.fused)}


def check_export(subject: Subject) -> Fields:
    """Check that ONNX Runtime agrees with the simulation, where it can run float files."""
    try:
        session = subject.session
        results = session.run(None, _feeds(session, subject.entry.example))
    except Exception:
        if _runs_in_float(subject):
            raise
        return {"export": FLOAT_FAILS, "exporter": subject.exporter}
    expected = outputs(subject.targeted, subject.entry.example)
    ratio = worst_decibels(
        [torch.from_numpy(array) for array in results], expected[: len(results)]
    )
    least = subject.agreement_db
    fields = {"export_db": ratio, "exporter": subject.exporter}
    if ratio <= least:
        # A file for ONNX Runtime has unsigned codes, which are finer where nothing is negative, and
        # its integer kernels round sums and means of their own.
        report = torchq.verify_onnx(
            subject.targeted, subject.path, [subject.entry.example]
        )
        ratio = min(round(o.sqnr_db, 1) for o in report.outputs) if report.ok else ratio
        fields["export_types_db"] = ratio
    problem = f"{ratio} dB, rounding explains {least}"
    return {"export": verdict(ratio > least, problem), "rounding_db": least, **fields}


def _export(export: Callable[[bool], object]) -> str:
    """Export with the TorchScript exporter, else with the newer one, and return its name.

    The newer exporter needs ten times as long, minutes for some networks.
    """
    try:
        export(False)
        return "torchscript"
    except Exception:
        export(True)
        return "dynamo"


def _runs_in_float(subject: Subject) -> bool:
    """Return True if torch exports the float network, and ONNX Runtime runs the file."""
    try:
        session = _float_session(subject.fused, subject.entry.example)
        session.run(None, _feeds(session, subject.entry.example))
    except Exception:
        return False
    return True


def _float_session(model: nn.Module, example: Any) -> Any:
    args, kwargs = (
        ((example,), {}) if isinstance(example, Tensor) else ((), dict(example))
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        _export(
            lambda dynamo: torch.onnx.export(
                model, args, str(path), kwargs=kwargs, dynamo=dynamo, verbose=False
            )
        )
        return _session(path)


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options)


def _feeds(session: Any, example: Any) -> dict[str, Any]:
    tensors = [example] if isinstance(example, Tensor) else list(example.values())
    names = [entry.name for entry in session.get_inputs()]
    return {name: x.numpy() for name, x in zip(names, tensors, strict=True)}


def check_deploy(subject: Subject) -> Fields:
    """Check that integer kernels agree with the simulation."""
    example = subject.entry.example
    ratio = worst_decibels(
        outputs(subject.deployed, example), outputs(subject.targeted, example)
    )
    least = subject.agreement_db
    problem = f"{ratio} dB, rounding explains {least}"
    return {
        "deploy": verdict(ratio > least, problem),
        "deploy_db": ratio,
        "rounding_db": least,
    }


CHECKS: dict[str, Callable[[Subject], Fields]] = {
    "plan": check_plan,
    "quantize": check_quantize,
    "off": check_off,
    "restore": check_restore,
    "save": check_save,
    "fuse": check_fuse,
    "export": check_export,
    "deploy": check_deploy,
}


def run_checks(name: str, checks: Iterable[str]) -> Iterator[Fields]:
    """Yield the fields of each check as it ends, and its seconds under ``KEY_s``."""
    start = time.perf_counter()
    subject = Subject(name)
    _ = subject.expected
    yield {"build_s": round(time.perf_counter() - start, 1)}
    for key in checks:
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fields = CHECKS[key](subject)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0]
                fields = {key: f"{type(error).__name__}: {first[:300]}"}
        yield fields | {f"{key}_s": round(time.perf_counter() - begin, 1)}
    yield {"seconds": round(time.perf_counter() - start, 1)}
