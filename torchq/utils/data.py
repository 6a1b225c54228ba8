"""Reading of plain data (JSON, YAML, checkpoints), and writing of files, whole or not at all.

Whatever data holds, the result is an object or one :class:`~torchq.errors.ConfigError`.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torchq.errors import ConfigError

_MAX_CHARACTERS = 80


def short_repr(value: object) -> str:
    """Return a ``repr`` for error texts that is short and never fails."""
    try:
        printed = repr(value)
    except (ValueError, RecursionError):  # A huge integer, or deeply nested lists.
        return f"a value of type {type(value).__name__} that cannot be printed"
    return (
        printed
        if len(printed) <= _MAX_CHARACTERS
        else printed[: _MAX_CHARACTERS - 3] + "..."
    )


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text."""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: got a {type(text).__name__}; expected JSON text")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        data = dict(pairs)
        if len(data) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ConfigError(
                f"{where}: got the keys {short_repr(twice)} twice; expected once"
            )
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    except ConfigError:
        raise
    except ValueError as error:  # An integer of thousands of digits.
        raise ConfigError(f"{where}: not usable JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{where}: JSON that is nested too deeply") from None


def check_fields(
    data: object, where: str, *, known: Iterable[str], required: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return ``data`` after checking that it is a mapping with the right keys."""
    allowed = sorted(known)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: got a {type(data).__name__}; expected a mapping with some of {allowed}"
        )
    unknown = sorted(short_repr(key) for key in data if key not in allowed)
    if unknown:
        raise ConfigError(
            f"{where}: got unknown keys [{', '.join(unknown)}]; expected some of {allowed}"
        )
    for key in required:
        if key not in data:
            raise ConfigError(
                f"{where}: got {short_repr(dict(data))}; expected a {key!r}"
            )
    return data


def why_no_model(head: bytes) -> str:
    """Return what the first bytes of a file are where they are those of no model; else ""."""
    if head.startswith(b"version https://git-lfs"):
        return "is a pointer of Git LFS in place of the file; run git lfs pull"
    if head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "is a page of HTML in place of the file; download the file itself"
    return ""


@contextmanager
def replacing(*paths: str | os.PathLike[str]) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths to write to; on success the files there take the places of ``paths``.

    They have the final names, in a new folder beside them, so they can refer to each other. Old
    files stay after an exception, or where nothing was written. Symbolic links are followed, and
    permissions kept.
    """
    final = [Path(os.path.realpath(path)) for path in paths]
    if any(
        path.exists() and not path.is_file() and not path.is_dir() for path in final
    ):
        yield tuple(final)
        return
    folder = final[0].parent
    if any(path.parent != folder for path in final):
        raise ValueError(
            f"replacing: got {[str(p) for p in final]}; expected paths in one folder"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{final[0]}: the folder {folder} does not exist. Create it first"
        )
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
