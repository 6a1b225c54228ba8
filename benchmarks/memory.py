"""Peak memory of a call, from what the operating system saw of this process (Linux)."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

__all__ = ["peak_bytes"]


def peak_bytes(call: Callable[[], object]) -> int | None:
    """Return by how many bytes ``call`` raised the resident memory, None if that is not known.

    Blocks below 32 MiB may come from memory that the allocator kept: use larger tensors, or a fresh
    process.
    """
    try:
        gc.collect()
        # Writing 5 sets the high-water mark to the present level.
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
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
