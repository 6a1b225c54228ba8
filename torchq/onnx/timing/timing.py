"""``time_onnx``: is a file as fast in ONNX Runtime as its float one, and which layers are not?"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.graph import call_arguments, tensors_in
from torchq.onnx.example_call import named_tensors, nested_tensors
from torchq.onnx.export import export_onnx, unwrap
from torchq.onnx.ir import Model, load_model, opset_of
from torchq.onnx.qdq import read_record
from torchq.onnx.timing.layers import LayerNames
from torchq.onnx.timing.report import TimedNode, TimeReport, layer_times
from torchq.onnx.verify.session import Session
from torchq.swap import restore_
from torchq.utils import bullets, copy_module, progress_bar
from torchq.workflow import quantizers

__all__ = ["time_onnx"]

#: Seconds that a sample lasts at least, and calls under the profiler.
_SAMPLE, _PROFILED = 0.01, 20
#: Layers in the text of a warning.
_NAMED = 5


def time_onnx(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    example: Any,
    *,
    rounds: int = 30,
    margin: float = 1.05,
    progress: bool = True,
) -> TimeReport:
    """Time a quantized file beside its float one in ONNX Runtime, and warn where it is slower.

    Both run on as many threads as torch uses, in turn, and the least of the samples counts. On one
    thread the processor's time is taken, of which other programs take none. Which layers are
    slower is what ONNX Runtime's own profiler says, in further calls.

    Args:
        model: The quantized model; left as it is. What it was before it was quantized is exported
            to a temporary file. Or the path of a float file with the same layers.
        path: The quantized file.
        example: As for :func:`torchq.export_onnx`; for a float file a tensor, several in the order
            of its inputs, or a mapping by their names.
        rounds: Samples of each file.
        margin: How many times as long as in float is still called equal.
        progress: Show a bar where it takes longer than a second.

    Returns:
        The times; ``print`` it, or ask ``report.ok`` and ``report.slower``.

    Raises:
        ConfigError: There is no round.
        ExportError: ONNX Runtime cannot run a file on the example, or the float model cannot be
            exported.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> torchq.onnx.time_onnx(model, "model.onnx", x).ok  # doctest: +SKIP
        True
    """
    if rounds < 1:
        raise ConfigError(f"time_onnx: got rounds={rounds}; expected at least 1. Pass rounds=30")
    with TemporaryDirectory() as folder:
        tensors = _tensors(model, example)
        if isinstance(model, nn.Module):
            other = Path(folder, "float.onnx")
            _export_float(unwrap(model), example, load_model(path), other)
        else:
            other = Path(model)
        least = dict.fromkeys((0, 1), float("inf"))
        sessions = [Session(file, optimize=True) for file in (path, other)]
        feeds = [session.feeds(tensors) for session in sessions]
        repeats = [_calls(*pair) for pair in zip(sessions, feeds, strict=True)]
        shown = progress_bar(range(rounds), description="time", unit="round", enabled=progress)
        for number in shown:
            for index in (0, 1) if number % 2 else (1, 0):
                seconds = _seconds(sessions[index], feeds[index], repeats[index])
                least[index] = min(least[index], seconds)
        layers = layer_times(_profile(path, tensors, folder), _profile(other, tensors, folder))
    report = TimeReport(
        os.fspath(path), least[0], least[1], margin, torch.get_num_threads(), layers
    )
    if not report.ok:
        _warn(report)
    return report


def _warn(report: TimeReport) -> None:
    """Warn of a slower file, with the layers that lose the most."""
    target = read_record(load_model(report.path)).get("target")
    fix = "Keep them float with quantize_(..., exclude=[...])"
    if target != "onnxruntime":
        fix = "Pass target='onnxruntime' to quantize_, with an example, and to export_onnx"
    lines = [f"{layer.name}: {layer}" for layer in report.slower[:_NAMED]]
    warnings.warn(
        f"time_onnx: {report.path} takes {1 / report.ratio:.2f} times as long as in float; most of "
        f"it in\n{bullets(lines)}\n{fix}",
        stacklevel=3,
    )


def _tensors(model: nn.Module | str | os.PathLike[str], example: Any) -> dict[str, Tensor]:
    """Return the tensors of an example by the names of a file's inputs."""
    if isinstance(model, nn.Module):
        inner = unwrap(model)
        return nested_tensors(inner, *call_arguments(inner, example))
    if isinstance(example, Mapping):
        return dict(example)
    return {f"input_{i}": tensor for i, tensor in enumerate(tensors_in(example))}


def _export_float(model: nn.Module, example: Any, file: Model, path: Path) -> None:
    """Write a model as it was before it was quantized, in the manner of its quantized file."""
    plain = copy_module(model)
    restore_(plain)
    for quantizer in quantizers(plain).values():  # that the author of the model placed
        quantizer.mode = "off"
    args, kwargs = call_arguments(model, example)
    opened: dict[str, dict[int, str]] = {}
    for name, value in zip(named_tensors(model, args, kwargs), file.graph.inputs, strict=False):
        lengths = list(enumerate(value.shape or ()))
        opened[name] = {
            dim: f"{name}_{dim}" for dim, length in lengths if not isinstance(length, int)
        }
    batch = any(0 in dims for dims in opened.values())
    rest = {name: {d: text for d, text in dims.items() if d} for name, dims in opened.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_onnx(
            plain,
            example,
            path,
            opset=opset_of(file),
            dynamo=any(node.metadata_props for node in file.graph),
            dynamic_batch=batch,
            dynamic_shapes=rest,
            input_names=[str(value.name) for value in file.graph.inputs],
            progress=False,
        )


def _calls(session: Session, feeds: Mapping[str, Tensor]) -> int:
    """Return how many calls fill a sample, after some that are not typical."""
    for _ in range(3):
        once = _seconds(session, feeds, 1)
    return max(1, round(_SAMPLE / max(once, 1e-6)))


def _seconds(session: Session, feeds: Mapping[str, Tensor], calls: int) -> float:
    """Return the seconds of one call, on average over a few."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for _ in range(calls):
        session.run(feeds)
    return (clock() - started) / calls


def _profile(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], folder: str
) -> list[TimedNode]:
    """Return the nodes of an optimised file in the order in which they run, with their times."""
    session = Session(path, optimize=True, profile=Path(folder, "profile"))
    for _ in range(_PROFILED):
        session.run(session.feeds(tensors))
    events = json.loads(Path(session.end_profile()).read_text())
    least: dict[tuple[str, str, str], float] = {}
    for event in events:
        if event.get("cat") != "Node" or not event["name"].endswith("_kernel_time"):
            continue
        details = event["args"]
        key = (
            details["node_index"],
            event["name"].removesuffix("_kernel_time"),
            details["op_name"],
        )
        least[key] = min(least.get(key, float("inf")), event["dur"] * 1e-6)
    layers = LayerNames(load_model(path)).of(name for _, name, _ in least)
    found = zip(least.items(), layers, strict=True)
    return [TimedNode(name, kind, layer, s) for ((_, name, kind), s), layer in found]
