"""A program of its own that compiles an ONNX file for a Qualcomm chip: ``compiling.py JOB.json``.

A compile may take minutes, prints to the standard output and keeps settings in its process, so it
never happens in the user's: :mod:`torchq.runtimes.qnn.session` runs this file, and ends it after a
while. It imports nothing of torchq, which would take longer than most compiles.

The job is a JSON object: ``model`` and ``context``, paths of the ONNX file to read and of the one
to write, whose single node holds the binary; ``soc``, the number of the chip; ``partly``, whether
what the chip does not take may run on the CPU; ``trace``, a folder; ``answer``, a path. The answer
is JSON too: ``error``, empty if the file was written, and ``unsupported``, lists of the operator,
its name and the reason, as the provider states them.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

PROVIDER = "QNNExecutionProvider"


def devices(runtime: Any, qnn: Any) -> list[Any]:
    """Return the devices of the provider, which a process may register once."""
    if not any(device.ep_name == PROVIDER for device in runtime.get_ep_devices()):
        runtime.register_execution_provider_library(PROVIDER, qnn.get_library_path())
    return [device for device in runtime.get_ep_devices() if device.ep_name == PROVIDER]


def options_for(runtime: Any, qnn: Any, settings: dict[str, str], partly: bool) -> Any:
    """Return options of a session on the emulator of the chip's integer unit."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # the provider's own words come from its trace
    settings = {"backend_path": qnn.get_qnn_htp_path(), **settings}
    options.add_provider_for_devices(devices(runtime, qnn), settings)
    if not partly:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return options


def compile_file(job: dict[str, Any]) -> None:
    """Write the file with the binary; raise what the provider raises."""
    runtime = import_module("onnxruntime")
    qnn = import_module("onnxruntime_qnn")
    settings = {
        "soc_model": job["soc"],
        "enable_framework_op_trace": "1",
        "framework_op_trace_dir": job["trace"],
    }
    options = options_for(runtime, qnn, settings, job["partly"])
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_file_path", job["context"])
    options.add_session_config_entry("ep.context_embed_mode", "1")
    runtime.InferenceSession(job["model"], options)


def unsupported_of(folder: Path) -> list[list[str]]:
    """Return what the provider did not take: the operator, its name and the reason."""
    rows: list[list[str]] = []
    for path in sorted(folder.rglob("qnn_op_trace.json")):
        trace = json.loads(path.read_text("utf-8"))
        for node in trace.get("unsupported_nodes", ()):
            rows.append(
                [str(node.get(key, "")) for key in ("op_type", "node_name", "reason")]
            )
    return rows


def main(path: str) -> int:
    """Carry out a job; return 0 whatever came of it, as the answer says that."""
    job = json.loads(Path(path).read_text("utf-8"))
    error = ""
    try:
        compile_file(job)
    except Exception as problem:  # of any kind: the provider is another program
        error = str(problem) or type(problem).__name__
    answer = {"error": error, "unsupported": unsupported_of(Path(job["trace"]))}
    Path(job["answer"]).write_text(json.dumps(answer), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
