"""``retarget_onnx``: a Q/DQ file for another runtime."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from torchq.onnx.ir import check_model, load_model, named_errors, run_passes, save_model
from torchq.onnx.passes.fold_constants import lift_constants
from torchq.onnx.passes.kernels.limited_sums import remove_limits
from torchq.onnx.passes.matmul_layout import keep_integer_matmuls
from torchq.onnx.qdq import write_record
from torchq.onnx.report import ExportReport, report_on
from torchq.onnx.targets import onnx_target
from torchq.utils import bullets

__all__ = ["retarget_onnx"]


def retarget_onnx(
    source: str | os.PathLike[str], path: str | os.PathLike[str], target: str
) -> ExportReport:
    """Write a Q/DQ file for another runtime; the counterpart of ``export_onnx(target=...)``.

    Args:
        source: A Q/DQ file of any exporter; scales must be constants.
        path: The file to write; it may be ``source``. It is replaced whole or not at all.
        target: The name of a runtime; one of ``torchq.swap.TARGETS``.

    Returns:
        What was written; ``print`` it.

    Raises:
        ConfigError: There is no such target, or it says nothing about files.
        ExportError: ``source`` is not a valid ONNX file.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> torchq.onnx.retarget_onnx("m.onnx", "m.ort.onnx", "onnxruntime")  # doctest: +SKIP
    """
    chosen = onnx_target(target)
    model = load_model(source)
    with named_errors(source):
        remove_limits(model)
        run_passes(model, (lift_constants, chosen.rewrite, keep_integer_matmuls))
        found = chosen.findings(model)
        write_record(model, target=target)
        check_model(model)
    if found:
        warnings.warn(f"retarget_onnx(target={target!r}):\n{bullets(found)}", stacklevel=2)
    size = save_model(model, path, check=False)
    return report_on(model, Path(path), target, "file", size, found)
