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
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.errors import CalibrationError, ConfigError
from torchq.graph import call_arguments
from torchq.nn import TensorQuantizer, quantizing_only
from torchq.utils import undone_on_error, untouched
from torchq.workflow import calibrate_weights, quantizers, weight_quantizers

_HEADER = re.compile(r"TRT-\d+-\w+")
_QMAX = 127.0
_EXPECTED = "expected a first line like TRT-8401-EntropyCalibration2, then 'tensor: 3c010a14'"


def read_calibration_cache(path: str | os.PathLike[str]) -> dict[str, float]:
    r"""Return the scale of each named tensor of a calibration cache.

    Args:
        path: The file, ``calib.cache`` by custom.

    Returns:
        Name of a tensor of the ONNX file -> scale, >= 0; infinity where the calibrator gave up.

    Raises:
        CalibrationError: The file has another first line, or a damaged one, which the text names.

    Example:
        >>> from tempfile import mkdtemp
        >>> path = Path(mkdtemp(), "calib.cache")
        >>> _ = path.write_text("TRT-8401-EntropyCalibration2\nx: 3c010204\n")
        >>> read_calibration_cache(path)
        {'x': 0.007874015718698502}
    """
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    if not lines or not _HEADER.fullmatch(lines[0].strip()):
        first = lines[0][:60] if lines else ""
        raise CalibrationError(f"{path}: got the first line {first!r}; {_EXPECTED}")
    found: dict[str, float] = {}
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        name, separator, digits = line.rstrip().rpartition(": ")
        scale = _scale(digits) if separator and name else math.nan
        if not scale >= 0:
            raise CalibrationError(f"{path}, line {number}: got {line[:80]!r}; {_EXPECTED}")
        if not name.startswith("(Unnamed Layer"):
            found[name] = scale
    return found


def _scale(digits: str) -> float:
    """Return the number that 8 hexadecimal digits stand for; NaN for other text."""
    if not re.fullmatch(r"[0-9a-fA-F]{8}", digits):
        return math.nan
    return float(struct.unpack(">f", bytes.fromhex(digits))[0])


def apply_calibration_cache(
    model: nn.Module, cache: Mapping[str, float] | str | os.PathLike[str], example: Any
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
    scales = cache if isinstance(cache, Mapping) else read_calibration_cache(cache)
    where = "the cache" if isinstance(cache, Mapping) else str(cache)
    if not isinstance(model, fx.GraphModule):
        raise ConfigError(
            f"apply_calibration_cache: got a {type(model).__name__}; expected what "
            "torchq.from_onnx made of the ONNX file, since the cache has names of its tensors"
        )
    tensors = _tensors_read(model, example)
    found = {
        path: [finite[-1] for names in calls if (finite := _finite(scales, names))]
        for path, calls in tensors.items()
    }
    _check_found(where, scales, tensors, found)
    known = quantizers(model)
    with undone_on_error(model):
        calibrate_weights(model)
        for path, names in found.items():
            _set_scale(known[path], max(scales[name] for name in names))
    return {path: names[-1] for path, names in found.items()}


def _finite(scales: Mapping[str, float], names: list[str]) -> list[str]:
    return [name for name in names if math.isfinite(scales.get(name, math.inf))]


def _check_found(
    where: str,
    scales: Mapping[str, float],
    tensors: Mapping[str, list[list[str]]],
    found: Mapping[str, list[str]],
) -> None:
    """Raise one error for all quantizers that the cache has no scale for."""
    missing = [path for path, names in found.items() if not names]
    if not missing:
        return
    counted = f"{where}: matches {len(found) - len(missing)} of {len(found)} quantizers"
    if len(missing) == len(found):
        read = [names[-1] for calls in tensors.values() for names in calls if names]
        raise CalibrationError(
            f"{counted}; expected the cache of this network. It has {_few([*scales])}, and the "
            f"model reads {_few(read)}"
        )
    rows = [
        f"{path} reads {_few([*names], scales)}"
        for path in missing[:5]
        for names in tensors[path][:1]
    ]
    more = f", ... ({len(missing)} in all)" if len(missing) > len(rows) else ""
    raise CalibrationError(
        f"{counted}; expected a finite scale for each. {'; '.join(rows)}{more}. Leave these layers "
        "in float with exclude=, or calibrate on data"
    )


def _few(names: list[str], scales: Mapping[str, float] | None = None) -> str:
    """Return the first names, and whether a cache has infinite scales for them."""
    infinite = scales is not None and not set(names).isdisjoint(scales)
    more = ", ..." if len(names) > 3 else ""
    text = f"{', '.join(names[:3])}{more}" if names else "no tensor of the file"
    return f"{text}, whose scale is infinite" if infinite else text


def _set_scale(quantizer: TensorQuantizer, scale: float) -> None:
    """Hold a scale as it is, or set the range where scales are rounded."""
    d = quantizer.descriptor
    if scale > 0 and d.num_bits == 8 and d.symmetric and d.block_scale_format is None:
        quantizer.set_qparams(scale)
    elif d.symmetric:
        quantizer.set_amax(scale * _QMAX)
    else:
        quantizer.set_range(-scale * _QMAX, scale * _QMAX)


def _tensors_read(model: fx.GraphModule, example: Any) -> dict[str, list[list[str]]]:
    """Return the names of the tensor that each call of a quantizer of an activation reads.

    One tensor has several where layers in between became nothing, as folded norms do.
    """
    weights = weight_quantizers(model)
    watched = {
        path: q for path, q in quantizers(model).items() if q.quantizing and id(q) not in weights
    }
    found: dict[str, list[list[str]]] = {path: [] for path in watched}
    run = _Named(model)
    with untouched(model), quantizing_only(quantizers(model).values()), torch.no_grad():
        handles = [
            quantizer.register_forward_pre_hook(
                lambda _, args, path=path: found[path].append(run.names(args[0]))
            )
            for path, quantizer in watched.items()
        ]
        try:
            args, kwargs = call_arguments(model, example)
            run.run(*args, *kwargs.values())
        finally:
            for handle in handles:
                handle.remove()
    return found


class _Named(fx.Interpreter):
    """Runs a graph and knows which tensors of the file its values are."""

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self._seen: dict[int, tuple[Tensor, list[str]]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and note the names of its result."""
        result = super().run_node(n)
        if isinstance(result, Tensor):  # Kept alive, so that no other tensor gets its id.
            _, names = self._seen.setdefault(id(result), (result, []))
            names.extend(n.meta.get("onnx_tensors", ()))
        return result

    def names(self, tensor: Tensor) -> list[str]:
        """Return the names of a tensor in the file, that of the last node behind the others."""
        return list(dict.fromkeys(self._seen.get(id(tensor), (tensor, []))[1]))
