"""Files without the pairs that their runtime does not round with, for a runtime that would."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from torchq.onnx.ir import load_model, named_errors, remove_unused, save_model
from torchq.onnx.passes.kernels.limited_sums import remove_limits

__all__ = ["as_computed"]


@contextmanager
def as_computed(path: str | os.PathLike[str]) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield a file that computes what OpenVINO does with the one at ``path``.

    See :func:`torchq.onnx.passes.kernels.limited_sums.limit_sums`.

    Args:
        path: An ONNX file.

    Yields:
        ``path`` itself where it has no limits, or a file that is removed afterwards; and the nodes
        whose limits change what is added.

    Raises:
        ExportError: The file is broken.
    """
    model = load_model(path)
    before = len(model.graph)
    with named_errors(path):
        wrong = tuple(remove_limits(model))
    if len(model.graph) == before:
        yield Path(path), ()
        return
    remove_unused(model)
    with TemporaryDirectory() as folder:
        file = Path(folder, Path(path).name)
        save_model(model, file, check=False)
        yield file, wrong
