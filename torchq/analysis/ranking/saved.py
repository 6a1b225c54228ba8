"""Results on disk as they come, so that a run that was stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from torchq.analysis.ranking.groups import Group
from torchq.errors import ConfigError
from torchq.nn import TensorQuantizer
from torchq.utils import parse_json, replacing

__all__ = ["SavedSums", "fingerprint"]

_SECONDS = 1.0


def fingerprint(groups: list[Group], known: list[TensorQuantizer], **settings: Any) -> str:
    """Return a text that is equal for runs whose results belong together.

    Args:
        groups: what is switched.
        known: all quantizers that are on; their descriptors and ranges count.
        **settings: metric, mode and the like, as text.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    for group in groups:
        digest.update(f"{group.name}:{sorted(group.quantizers)}".encode())
    for quantizer in known:
        digest.update(str(quantizer.descriptor).encode())
        amax = quantizer.amax.detach().float().cpu()
        digest.update(amax.numpy().tobytes() if amax.numel() else b"-")
    return digest.hexdigest()


class SavedSums:
    """Sums of each group, with the number of batches in them, kept in a file.

    Args:
        path: a JSON file, made if it does not exist; None keeps nothing.
        key: see :func:`fingerprint`.

    Raises:
        ConfigError: The file is of another run, or no such file at all.
    """

    def __init__(self, path: str | os.PathLike[str] | None, key: str) -> None:
        self._path = None if path is None else Path(path)
        self._key = key
        self._written = time.monotonic()
        self.sums: dict[str, list[float]] = {}
        self.batches: dict[str, int] = {}
        if self._path is not None and self._path.exists():
            self._read(self._path)

    def _read(self, path: Path) -> None:
        data = parse_json(path.read_text(encoding="utf-8"), f"resume={path}")
        expected = {"key", "sums", "batches"}
        if not isinstance(data, dict) or set(data) != expected or data["key"] != self._key:
            raise ConfigError(
                f"sensitivity: {path} holds the results of another run; expected the same model, "
                "ranges, batches and metric. Delete it, or pass another path as resume="
            )
        self.sums = {str(k): [float(x) for x in v] for k, v in data["sums"].items()}
        self.batches = {str(k): int(v) for k, v in data["batches"].items()}

    def done(self, name: str) -> int:
        """Return how many batches are in the sums of a group."""
        return self.batches.get(name, 0)

    def add(self, name: str, sums: list[float]) -> None:
        """Add the sums of one batch; the file is written about once a second."""
        before = self.sums.get(name, [0.0] * len(sums))
        self.sums[name] = [a + b for a, b in zip(before, sums, strict=True)]
        self.batches[name] = self.done(name) + 1
        if time.monotonic() - self._written > _SECONDS:
            self.write()

    def write(self) -> None:
        """Replace the file by what is known now."""
        self._written = time.monotonic()
        if self._path is None:
            return
        data = {"key": self._key, "sums": self.sums, "batches": self.batches}
        with replacing(self._path) as (temporary,):
            temporary.write_text(json.dumps(data), encoding="utf-8")
