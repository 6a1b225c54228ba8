"""Checks of torchq on one network, each independent of the others.

A check gets a :class:`Subject` and returns the fields of its result. Its verdict is ``"ok"`` or a
short text that says what is wrong; a check that raises has the error as its verdict.
"""

from __future__ import annotations

import copy
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

import torchq
from benchmarks.weight_calls import count
from benchmarks.zoo_models import Entry, build, call
from torchq.nn import QuantModule
from torchq.swap.cost import HARMLESS, MOST

__all__ = ["CHECKS", "Subject", "run_checks"]

Fields = dict[str, Any]
# Exported or deployed against the simulation. Another order of additions changes results by about
# 1e-6, which flips codes that lie between two, and each flip makes more of them. So the simulation
# is compared with itself as well, with results of layers changed that much. That flips other codes,
# hence the margin. A flipped code in every tensor leaves about 35 dB.
ROUNDING = 1e-6
MARGIN_DB = 10.0
ENOUGH_DB = 35.0


class Subject:
    """A network by name, and the models that several checks share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.entry: Entry = build(name)
        self.model = self.entry.model

    @cached_property
    def expected(self) -> list[Tensor]:
        """The outputs of the float model for the example."""
        return outputs(self.model, self.entry.example)

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
        """The copy for ONNX Runtime on integer kernels."""
        return torchq.deploy(self.targeted, self.entry.example)

    @cached_property
    def session(self) -> Any:
        """ONNX Runtime with the exported copy."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "int8.onnx"
            torchq.export_onnx(self.targeted, self.entry.example, path, target="onnxruntime")
            return _session(path)

    @cached_property
    def agreement_db(self) -> float:
        """The least agreement with the simulation that rounding explains, in dB."""
        expected = outputs(self.targeted, self.entry.example)
        ratios = [
            decibels(with_rounding(self.targeted, self.entry.example, seed), expected)
            for seed in range(3)
        ]
        return min(ENOUGH_DB, min(ratios) - MARGIN_DB)

    def calibrated(self, target: str | None) -> nn.Module:
        """Return a fused copy, quantized for a target and calibrated on the example."""
        model = copy.deepcopy(self.model)
        torchq.fuse_(model)
        example = self.entry.example if target else None
        torchq.quantize_(model, target=target, example=example)
        torchq.calibrate(model, [self.entry.example], progress=False, on_unseen="disable")
        return model


# --- comparing -----------------------------------------------------------------------------------


def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """Return the tensors of the model's result, in a fixed order, with random functions seeded."""
    torch.manual_seed(0)
    with torch.no_grad():
        result = call(model, batch)
    if not isinstance(result, Tensor | tuple | list | dict):
        result = dict(result) if hasattr(result, "keys") else vars(result)
    return [leaf.detach().clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def with_rounding(model: nn.Module, batch: Any, seed: int) -> list[Tensor]:
    """Return the outputs with the result of every quantized layer changed by a rounding error."""
    generator = torch.Generator().manual_seed(seed)

    def change(module: nn.Module, args: Any, result: Any) -> Any:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return result
        return result * (1 + ROUNDING * torch.randn(result.shape, generator=generator))

    layers = [m for m in model.modules() if isinstance(m, QuantModule) and not m.is_container]
    hooks = [layer.register_forward_hook(change) for layer in layers]
    try:
        return outputs(model, batch)
    finally:
        for hook in hooks:
            hook.remove()


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return True if all tensors are equal bit for bit; NaN equals NaN."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0))
        if x.is_floating_point()
        else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def decibels(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the worst ratio of signal to error over the floating-point outputs, at most 200."""
    worst = 200.0
    for x, y in zip(found, expected, strict=True):
        if not y.is_floating_point() or y.numel() == 0:
            continue
        if x.shape != y.shape:
            return float("-inf")  # a detector kept another number of boxes
        signal, error = y.double().square().sum(), (x.double() - y.double()).square().sum()
        if error > 0:
            worst = min(worst, float(10 * torch.log10(signal / error)))
    return round(worst, 1)


def verdict(good: bool, problem: str) -> str:
    """Return ``"ok"`` or the problem."""
    return "ok" if good else problem


def class_of_each_path(model: nn.Module) -> dict[str, type]:
    """Return the class at each path of the module tree, shared modules under all their paths."""
    return {name: type(m) for name, m in model.named_modules(remove_duplicate=False)}


def checksum(tensor: Tensor) -> int:
    """Return a number that tells the values of a dense tensor on the CPU from other ones."""
    return zlib.crc32(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())


def state(model: nn.Module) -> dict[str, Any]:
    """Return what a dry run must leave alone: classes, attributes, the contents of containers."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[name] = (type(module), sorted(vars(module)))
        for key, value in vars(module).items():
            leaves, _ = tree_flatten_with_path(value)
            found[f"{name}.{key}"] = [
                (str(path), id(leaf), checksum(leaf) if isinstance(leaf, Tensor) else 0)
                for path, leaf in leaves
            ]
    return found


# --- the checks ----------------------------------------------------------------------------------


def check_plan(subject: Subject) -> Fields:
    """Check that ``plan`` leaves the model alone, with and without a target."""
    _ = subject.expected  # some networks cache something in their first forward
    before = state(subject.model)
    torchq.plan(subject.model)
    torchq.plan(subject.model, target="onnxruntime")
    after = state(subject.model)
    changed = [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
    return {"plan": verdict(not changed, f"changed {', '.join(sorted(changed)[:3])}")}


def check_quantize(subject: Subject) -> Fields:
    """Check that quantizing works, and count the products with weights that it leaves float."""
    model = copy.deepcopy(subject.model)
    total = count(model, lambda: call(model, subject.entry.example)).total
    report = torchq.quantize_(model)
    torchq.calibrate(model, [subject.entry.example], progress=False, on_unseen="disable")
    left = count(model, lambda: call(model, subject.entry.example)).floating
    weighted = [
        decision
        for decision in report.skipped
        if any(p.dim() > 1 for p in decision.module.parameters(recurse=False))
    ]
    reasons = {decision.name: decision.reason for decision in weighted}
    found = outputs(model, subject.entry.example)
    finite = all(bool(x.isfinite().all()) for x in found if x.is_floating_point())
    return {
        "quantize": verdict(finite, "not finite"),
        "products": total,
        "left_float": len(left),
        "left_shapes": sorted(set(left)),
        "left_reasons": reasons,
        "db": decibels(found, subject.expected),
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
    model = copy.deepcopy(subject.model)
    classes = class_of_each_path(model)
    torchq.quantize_(model, target="onnxruntime", example=subject.entry.example)
    torchq.restore_(model)
    good = class_of_each_path(model) == classes
    equal = same(outputs(model, subject.entry.example), subject.expected)
    return {"restore": verdict(good and equal, "bits differ" if good else "classes differ")}


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
    ratio = decibels(outputs(model, subject.entry.example), subject.expected)
    return {"fuse": verdict(ratio > 60, f"{ratio} dB"), "fused": len(report.fused)}


def check_target(subject: Subject) -> Fields:
    """Check that the quantizers placed for ONNX Runtime cost 3 dB at most, or leave 25 dB.

    They are chosen so on ranges of their own; shared ranges, which come later, may cost some more.
    """
    plain = decibels(outputs(subject.quantized, subject.entry.example), subject.expected)
    model = subject.targeted
    placed = decibels(outputs(model, subject.entry.example), subject.expected)
    left = count(model, lambda: call(model, subject.entry.example)).floating
    good = placed > min(plain - MOST, HARMLESS) - 0.5
    return {
        "target": verdict(good, f"{placed} dB, without {plain} dB"),
        "target_db": placed,
        "left_target": len(left),
    }


def check_export(subject: Subject) -> Fields:
    """Check that ONNX Runtime agrees with the simulation."""
    session = subject.session
    found = session.run(None, _feeds(session, subject.entry.example))
    expected = outputs(subject.targeted, subject.entry.example)
    ratio = decibels([torch.from_numpy(array) for array in found], expected[: len(found)])
    least = subject.agreement_db
    problem = f"{ratio} dB, rounding explains {least}"
    return {"export": verdict(ratio > least, problem), "export_db": ratio, "rounding_db": least}


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
    ratio = decibels(outputs(subject.deployed, example), outputs(subject.targeted, example))
    least = subject.agreement_db
    problem = f"{ratio} dB, rounding explains {least}"
    return {"deploy": verdict(ratio > least, problem), "deploy_db": ratio, "rounding_db": least}


def check_speed(subject: Subject) -> Fields:
    """Time ONNX Runtime and the deployed model beside float; ratios above 1 are faster."""
    example, floating = subject.entry.example, copy.deepcopy(subject.model)
    torchq.fuse_(floating)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        args, kwargs = ((example,), {}) if isinstance(example, Tensor) else ((), dict(example))
        torch.onnx.export(floating, args, str(path), kwargs=kwargs, dynamo=True, verbose=False)
        sessions = {"int8": subject.session, "float": _session(path)}
    feeds = {name: _feeds(session, example) for name, session in sessions.items()}
    files = measure({n: lambda n=n: sessions[n].run(None, feeds[n]) for n in sessions})
    models = {"int8": subject.deployed, "float": floating}
    with torch.inference_mode():
        times = measure({n: lambda n=n: call(models[n], example) for n in models})
    ratios = [round(t["float"] / t["int8"], 2) for t in (files, times)]
    return {"speed": "ok", "export_speed": ratios[0], "deploy_speed": ratios[1]}


def measure(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each call, over rounds that alternate and last 2 s at most."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + 2
    while time.perf_counter() < end or float("inf") in best.values():
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


CHECKS: dict[str, Callable[[Subject], Fields]] = {
    "plan": check_plan,
    "quantize": check_quantize,
    "off": check_off,
    "restore": check_restore,
    "save": check_save,
    "fuse": check_fuse,
    "target": check_target,
    "export": check_export,
    "deploy": check_deploy,
    "speed": check_speed,
}


def run_checks(name: str, checks: Iterable[str]) -> Iterator[Fields]:
    """Yield the fields of each check as it ends; the last key of an error names its kind."""
    start = time.perf_counter()
    subject = Subject(name)
    _ = subject.expected
    for key in checks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                yield CHECKS[key](subject)
            except Exception as error:
                text = (str(error).splitlines() or [""])[0]
                yield {key: f"{type(error).__name__}: {text[:300]}"}
    yield {"seconds": round(time.perf_counter() - start, 1)}
