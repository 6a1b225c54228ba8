"""Writing files so that each is replaced whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing"]


@contextmanager
def replacing(*paths: str | os.PathLike[str]) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths to write to; on success the files there take the places of ``paths``.

    The temporary files have the names of the final ones and lie in a new folder beside them, so
    that they can refer to each other by name, and so that moving them is a rename on one disk.
    An exception inside the ``with`` block, or a full disk, leaves the old files as they were.
    A path that was not written is left alone. Symbolic links are followed, and a file keeps the
    permissions of the one that it replaces.

    Args:
        paths: final paths, all in one folder. They are replaced in this order.

    Yields:
        One temporary path for each of ``paths``. A device such as ``/dev/null`` is yielded as it
        is, because it cannot be replaced.

    Raises:
        FileNotFoundError: The folder does not exist.
        ValueError: The paths lie in different folders.

    Example:
        >>> path = Path(tempfile.mkdtemp(), "numbers.txt")
        >>> with replacing(path) as (temporary,):
        ...     _ = temporary.write_text("1 2 3")
        >>> path.read_text()
        '1 2 3'
    """
    final = [Path(os.path.realpath(path)) for path in paths]
    if any(path.exists() and not path.is_file() and not path.is_dir() for path in final):
        yield tuple(final)
        return
    folder = final[0].parent
    if any(path.parent != folder for path in final):
        raise ValueError(f"replacing: got {[str(p) for p in final]}; expected paths in one folder")
    if not folder.is_dir():
        raise FileNotFoundError(f"{final[0]}: the folder {folder} does not exist. Create it first")
    temporary = Path(tempfile.mkdtemp(prefix=".torchq.", dir=folder))
    try:
        written = [temporary / path.name for path in final]
        yield tuple(written)
        for source, target in zip(written, final, strict=True):
            if source.exists():
                _move(source, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Rename a complete file over another one; its contents reach the disk first."""
    if target.is_file():
        shutil.copymode(target, source)
    with source.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
