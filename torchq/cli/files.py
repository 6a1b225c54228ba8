"""Networks in files of other frameworks, by name."""

from __future__ import annotations

import glob
import re
from pathlib import Path

from torch import fx

from torchq.errors import ConfigError
from torchq.frontends import from_caffe, from_mxnet, from_onnx

__all__ = ["ENDINGS", "is_network_file", "read_network", "reader_text"]

#: What names of such files end with.
ENDINGS = (".onnx", "-symbol.json", ".prototxt")


def is_network_file(name: str) -> bool:
    """Return True if a name is that of a file which holds a network."""
    return name.endswith(ENDINGS)


def read_network(name: str, weights: str | None = None) -> fx.GraphModule:
    """Return the network of a file.

    Args:
        name: of the file.
        weights: the file with the weights, by default the one beside it: ``NAME-0000.params`` with
            the highest number, or ``NAME.caffemodel``. ONNX files hold their weights.

    Raises:
        ConfigError: The file of weights is not there.
        FrontendError: A file cannot be read.
    """
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
        raise ConfigError(
            f"{name}: got no .{kind} beside it; expected {Path(pattern).name}. "
            "Name the file with --weights"
        )
    return max(found)
