"""What a test may not leave behind: settings of torch, threads, processes and files.

The conftest.py of the repository compares :func:`remains` before and after each test.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

__all__ = ["left_behind", "remains", "settings_are_torchs_own"]

ROOT = Path(__file__).resolve().parent.parent
#: What a process or thread has a moment for after its test: to end.
PATIENCE = 2.0
#: Processes and threads by which Python, torch and tqdm serve all of a process; they end with it.
SERVANTS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "compile_worker",
    "tqdm_monitor",
)
#: What Inductor, ONNX Runtime and multiprocessing keep among temporary files.
CACHES = ("torchinductor_", ".ses", "pymp-")
#: Torch 2.9 writes this file into a folder of its own when torch.distributed.nn is imported.
REMOTE = "_remote_module_non_scriptable.py"
PROCESSES = Path("/proc/self/task")


def settings_are_torchs_own() -> None:
    """Fail if a dtype, a grad mode or an active patch is left."""
    assert torch.get_default_dtype() is torch.float32
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    probe = nn.Sequential(nn.Linear(1, 1, device="meta"))
    assert type(probe[0]) is nn.Linear


def remains() -> set[str]:
    """Return names of the threads, child processes and files that are there now."""
    computing = {name for name in threads() | processes() if not is_servant(name)}
    return computing | files_of_the_sources() | temporary_entries()


def is_servant(name: str) -> bool:
    return any(servant in name for servant in SERVANTS)


def left_behind(before: set[str]) -> set[str]:
    """Return what is there beyond ``before``, once what is ending has ended."""
    left = remains() - before
    if not left:
        return left
    gc.collect()  # a loader of data ends its processes when it is collected
    end = time.monotonic() + PATIENCE
    while (left := remains() - before) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def threads() -> set[str]:
    """Return the threads that Python started; native libraries keep pools of their own."""
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)
    }


def processes() -> set[str]:
    """Return the child processes, those of subprocess too where the system lists them."""
    if not PROCESSES.is_dir():
        return {
            f"process {child.pid} {child.name}"
            for child in multiprocessing.active_children()
        }
    if not has_children():
        return set()
    numbers = [number for task in PROCESSES.iterdir() for number in children_of(task)]
    return {f"process {number} {command_of(number)}" for number in numbers}


def children_of(task: Path) -> list[str]:
    """Return the numbers of the processes that a thread has started."""
    try:
        return (task / "children").read_text().split()
    except OSError:  # The thread ended since it was listed.
        return []


def has_children() -> bool:
    """Return whether this process has children, without waiting for any."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def command_of(number: str) -> str:
    """Return how a process was started; empty if it has just ended."""
    try:
        command = Path("/proc", number, "cmdline").read_bytes()
    except OSError:
        return ""
    return command.replace(b"\0", b" ").decode(errors="replace")[:200]


def files_of_the_sources() -> set[str]:
    """Return the files in the repository's root, where tests run; folders there are caches."""
    with os.scandir(ROOT) as entries:
        files = [entry for entry in entries if entry.is_file()]
    # coverage.py writes its own while tests run.
    return {
        f"file {file.path}" for file in files if not file.name.startswith(".coverage")
    }


def temporary_entries() -> set[str]:
    """Return what is in the folder for temporary files, which each session has for itself."""
    folder = tempfile.gettempdir()
    return {
        f"file {folder}/{name}"
        for name in os.listdir(folder)
        if not name.startswith(CACHES) and not Path(folder, name, REMOTE).exists()
    }
