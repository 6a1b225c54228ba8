"""Files on the emulator of Qualcomm's integer unit, each compiled by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.runtimes.qnn import compiling
from torchq.utils.optional import import_optional

#: Reasons that an error lists.
_SHOWN = 5
_OPENING = threading.Lock()


def compiled(
    graph: bytes, soc: str, *, partly: bool, limit: float, where: str
) -> bytes:
    """Return an ONNX file whose node holds the binary for a chip.

    Args:
        graph: an ONNX file whose lengths are all fixed.
        soc: the number of the chip.
        partly: Whether operators that the chip does not take may run on the CPU.
        limit: seconds; then the process that compiles is ended.
        where: what error texts begin with.

    Raises:
        ExportError: the chip does not take all of it, or the compile took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = {
            "model": str(folder / "model.onnx"),
            "context": str(folder / "context.onnx"),
            "trace": str(folder / "trace"),
            "answer": str(folder / "answer.json"),
            "soc": soc,
            "partly": partly,
        }
        (folder / "model.onnx").write_bytes(graph)
        (folder / "trace").mkdir()
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        try:
            subprocess.run(
                [sys.executable, compiling.__file__, str(folder / "job.json")],
                capture_output=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ExportError(
                f"{where}: the compile took longer than {limit:g} s and was ended. Parts in float "
                "take longest: quantize them, or pass torchq.runtimes.Qnn(limit=...)"
            ) from None
        answer = _answer_of(folder / "answer.json")
        if answer["error"] or not (folder / "context.onnx").exists():
            raise ExportError(f"{where}: {_problem(answer)}")
        return (folder / "context.onnx").read_bytes()


def _answer_of(path: Path) -> Mapping[str, object]:
    if not path.exists():
        return {"error": "the process that compiles died", "unsupported": []}
    answer: Mapping[str, object] = json.loads(path.read_text("utf-8"))
    return answer


def _problem(answer: Mapping[str, Any]) -> str:
    """Return why a file was not compiled, with what the chip did not take."""
    rows = [
        f"{_layer_of(name)} ({kind}): {reason}"
        for kind, name, reason in answer["unsupported"]
    ]
    if not rows:
        error = str(answer["error"]).partition("\n")[0]
        return f"the provider failed ({error}); expected a file that it compiles"
    more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return (
        f"the chip does not take {'; '.join(rows[:_SHOWN])}{more}. Pass "
        "torchq.runtimes.Qnn(partly=True) to run these on the CPU"
    )


def _layer_of(name: str) -> str:
    """Return the layer of a pair or an operator in the file."""
    return name.partition("/")[0].removesuffix(".weight_quantizer") or name.strip("/")


class Session:
    """A compiled file in this process. Threads may share it, and forks may not."""

    def __init__(self, context: bytes, *, partly: bool) -> None:
        runtime = import_optional("onnxruntime", "torchq.runtimes.Qnn", "qnn")
        qnn = import_optional("onnxruntime_qnn", "torchq.runtimes.Qnn", "qnn")
        # The provider is registered once, and the output of the process is closed by one at a time.
        with _OPENING, _without_output():
            options = compiling.options_for(runtime, qnn, {}, partly)
            self._session = runtime.InferenceSession(context, options)
        # Otherwise a failed call runs again on the CPU, without a word.
        self._session.disable_fallback()
        self._process = os.getpid()

    def __call__(self, feeds: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the results for inputs by name."""
        if os.getpid() != self._process:
            raise ExportError(
                "qnn: got a call in a process that was forked since the model was opened; expected "
                "one in the same process, as the emulator hangs. Start processes by spawn"
            )
        arrays = {name: value.numpy() for name, value in feeds.items()}
        return [torch.from_numpy(array) for array in self._session.run(None, arrays)]


@contextmanager
def _without_output() -> Iterator[None]:
    """Close the standard output of the process for a while: the library prints a line to it."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
