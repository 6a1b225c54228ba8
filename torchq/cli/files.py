"""Files by name: checks before any work, and networks of other frameworks."""

import argparse
import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path

from torch import fx

from torchq.errors import ConfigError
from torchq.frontends import from_caffe, from_mxnet, from_onnx
from torchq.runtime import Writer, runtime_of

#: What names of files with networks end with.
ENDINGS = (".onnx", "-symbol.json", ".prototxt")


#: Arguments that name files to read, or a model or recipe that may be a file.
_READ = ("file", "model", "weights", "recipe", "load")
_FLAGS = {"file": "MODEL"}
#: Arguments that name files to write, and what some of the names must end with.
_WRITTEN = ("export", "save", "report", "out", "to")
_WRITTEN_ENDINGS: dict[str, tuple[str, ...]] = {"export": (".onnx",), "to": (".pt2",)}


def check_paths(args: argparse.Namespace) -> None:
    """Raise an error for files of a command that are not there, or that could not be written."""
    read, written = {}, {}
    for name in _READ:
        path = getattr(args, name, None)
        is_file = name in ("weights", "load") or str(path).endswith((*ENDINGS, ".json"))
        if path is not None and is_file:
            read[option := _FLAGS.get(name, f"--{name}")] = path
            _check_readable(option, path)
    for name in _WRITTEN:
        path, endings = getattr(args, name, None), _WRITTEN_ENDINGS.get(name, ("",))
        if path is not None and args.command != "demo":  # which makes its folder
            written[option := _FLAGS.get(name, f"--{name}")] = path
            check_folder(option, path)
            if name == "export":
                endings = (*endings, *writers_of(args))
            if not path.endswith(endings):
                known = " or ".join(endings)
                raise ConfigError(f"{option} {path}: expected a name that ends in {known}")
    check_different(written, read)


def writers_of(args: argparse.Namespace) -> Mapping[str, Writer]:
    """Return what writes files of the target's own, by the ending of their names."""
    runtime = runtime_of(getattr(args, "target", None))
    return {} if runtime is None else runtime.writers()


def _check_readable(option: str, path: str) -> None:
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    if not Path(path).exists():
        raise ConfigError(f"{option} {path}: no such file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"{option} {path}: is not readable")


def check_folder(option: str, path: str | Path) -> None:
    """Raise an error where a file could not be written later, before any work is done."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir():
        raise ConfigError(f"{option} {path}: is a folder; expected a file")
    if not folder.is_dir():
        raise ConfigError(f"{option} {path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {path}: the folder {folder} is not writable")


def check_different(
    written: Mapping[str, str | None], read: Mapping[str, str] | None = None
) -> None:
    """Raise an error where an option names the file of another one, also through links."""
    seen = {os.path.realpath(path): option for option, path in (read or {}).items()}
    for option, path in written.items():
        if path is None:
            continue
        first = seen.setdefault(os.path.realpath(path), option)
        if first != option:
            raise ConfigError(f"{option} {path}: is the file of {first} too; expected another one")


def is_network_file(name: str) -> bool:
    """Return True if a name is that of a file which holds a network."""
    return name.endswith(ENDINGS)


def read_network(name: str, weights: str | None = None) -> fx.GraphModule:
    """Return the network of a file, by default with the weights beside it."""
    if name.endswith(".onnx"):
        return from_onnx(name)
    reader = from_mxnet if name.endswith("-symbol.json") else from_caffe
    return reader(name, weights or _weights_beside(name))


def reader_text(name: str, weights: str | None = None) -> str:
    """Return the Python code of :func:`read_network`."""
    if name.endswith(".onnx"):
        return f"torchq.from_onnx({name!r})"
    function = "from_mxnet" if name.endswith("-symbol.json") else "from_caffe"
    return f"torchq.{function}({name!r}, {weights or _weights_beside(name)!r})"


def _weights_beside(name: str) -> str:
    if name.endswith(".prototxt"):
        stem = name.removesuffix(".prototxt")
        pattern, kind = f"{glob.escape(stem)}.caffemodel", "caffemodel"
    else:
        stem = name.removesuffix("-symbol.json")
        pattern, kind = f"{glob.escape(stem)}-[0-9]*.params", "params"
    numbered = r"-\d+\.params|\.caffemodel"
    found = [path for path in glob.glob(pattern) if re.fullmatch(numbered, path[len(stem) :])]
    if not found:
        text = f"{name}: got no .{kind} beside it; expected {Path(pattern).name}. "
        text += "Name the file with --weights"
        raise ConfigError(text)
    return max(found)
