"""Calibration caches: text files with the scale of each tensor of a network, and their use.

The first line says which program and which algorithm wrote it, ``TRT-8401-EntropyCalibration2``.
Each other line is ``tensor: 3c010a14``, the name of a tensor of the ONNX file and the big-endian
float32 of its scale, which is amax / 127. Names such as ``(Unnamed Layer* 3) [Shuffle]_output``
belong to layers that the program made up itself.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from torchq.errors import CalibrationError
from torchq.nn import TensorQuantizer
from torchq.onnx.named_tensors import named_tensors
from torchq.utils import network_of, undone_on_error
from torchq.workflow import calibrate_weights, quantizers

_HEADER = re.compile(r"TRT-\d+-\w+")
_QMAX = 127.0
_EXPECTED = (
    "expected a first line like TRT-8401-EntropyCalibration2, then 'tensor: 3c010a14'"
)


def read_calibration_cache(path: str | os.PathLike[str]) -> dict[str, float]:
    r"""Return the scale of each named tensor of a calibration cache.

    Args:
        path: The file, ``calib.cache`` by custom.

    Returns:
        Name of a tensor of the ONNX file -> scale, >= 0; infinity where the calibrator gave up.

    Raises:
        CalibrationError: The file has another first line, or a damaged one, which the text names.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "calib.cache")
        ...     _ = path.write_text("TRT-8401-EntropyCalibration2\nx: 3c010204\n")
        ...     read_calibration_cache(path)
        {'x': 0.007874015718698502}
    """
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    if not lines or not _HEADER.fullmatch(lines[0].strip()):
        first = lines[0][:60] if lines else ""
        raise CalibrationError(f"{path}: got the first line {first!r}; {_EXPECTED}")
    scale_by_tensor: dict[str, float] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        name, separator, digits = line.rstrip().rpartition(": ")
        scale = _scale(digits) if separator and name else math.nan
        if not scale >= 0:
            raise CalibrationError(
                f"{path}, line {number}: got {line[:80]!r}; {_EXPECTED}"
            )
        if not name.startswith("(Unnamed Layer"):
            scale_by_tensor[name] = scale
    return scale_by_tensor


def _scale(digits: str) -> float:
    """Return the number that 8 hexadecimal digits stand for; NaN for other text."""
    if not re.fullmatch(r"[0-9a-fA-F]{8}", digits):
        return math.nan
    return float(struct.unpack(">f", bytes.fromhex(digits))[0])


def apply_calibration_cache(
    model: nn.Module,
    cache: Mapping[str, float] | str | os.PathLike[str],
    example: object,
) -> dict[str, str]:
    """Give a quantized model the ranges of a calibration cache, in place of calibrating it.

    Weights take their ranges from themselves. A quantizer that reads several tensors, as in front
    of a concatenation, takes the largest scale.

    Args:
        model: What :func:`torchq.from_onnx` made of the ONNX file that the cache belongs to, then
            fused or not, and quantized.
        cache: A path, or what :func:`read_calibration_cache` returned.
        example: Arguments for one call, such as random numbers; they show which tensor each
            quantizer reads. See :func:`torchq.graph.call_arguments`.

    Returns:
        Path of a quantizer of an activation -> the name of the tensor in the file.

    Raises:
        ConfigError: The model was not read from an ONNX file.
        CalibrationError: A quantizer's tensor has no scale, as in a cache of another network, or an
            infinite one. The model stays as it was.
    """
    model = network_of(model)
    scales = cache if isinstance(cache, Mapping) else read_calibration_cache(cache)
    where = "the cache" if isinstance(cache, Mapping) else str(cache)
    finite = {name: math.isfinite(scale) for name, scale in scales.items()}
    tensors_by_path = named_tensors(where, model, example, finite)
    quantizer_by_path = quantizers(model)
    with undone_on_error(model):
        calibrate_weights(model)
        for path, names in tensors_by_path.items():
            _set_scale(quantizer_by_path[path], max(scales[name] for name in names))
    return {path: names[-1] for path, names in tensors_by_path.items()}


def _set_scale(quantizer: TensorQuantizer, scale: float) -> None:
    """Hold a scale as it is, or set the range where scales are rounded."""
    d = quantizer.descriptor
    # A cache holds a 127th of each range. Unsigned codes have twice as many steps in it.
    is_int8 = d.num_bits == 8 and d.symmetric and d.format.signed
    if scale > 0 and is_int8 and d.block_scale_format is None:
        quantizer.set_qparams(scale)
    elif d.symmetric:
        quantizer.set_amax(scale * _QMAX)
    else:
        quantizer.set_range(-scale * _QMAX, scale * _QMAX)
