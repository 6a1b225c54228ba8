"""Peak memory of a call, from what the operating system saw of this process (Linux)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_bytes"]


def peak_bytes(call: Callable[[], object]) -> int | None:
    """How far resident memory rose above its level before ``call``; None where the system does not tell.

    Blocks below 32 MiB may come from memory that the allocator kept: use tensors larger than that, or a fresh process.
    """
    try:
        gc.collect()
        Path("/proc/self/clear_refs").write_text(
            "5", encoding="ascii"
        )  # sets the high-water mark to the present level
        before = _status("VmRSS")
        call()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")
