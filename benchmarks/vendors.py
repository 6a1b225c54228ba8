"""The quantizers of the runtimes' makers, which torchq's files are measured against.

Each reads a float ONNX file and writes a quantized one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

__all__ = ["VENDORS"]


def onnxruntime_static(
    source: Path, path: Path, images: Sequence[Tensor], transformer: bool
) -> str:
    """Quantize with ``onnxruntime.quantization``, after its own preprocessing.

    It writes Q/DQ, uint8 activations, int8 weights per channel. In transformers it quantizes only
    products with weights, as its guide advises; everything else is its default.
    """
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"x": image.numpy()} for image in images]

        def get_next(self) -> dict[str, Any] | None:
            return self.left.pop(0) if self.left else None

    prepared = path.with_suffix(".prepared.onnx")
    quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
    options: dict[str, Any] = {}
    if transformer:
        options = {
            "op_types_to_quantize": ["MatMul", "Gemm"],
            "extra_options": {"MatMulConstBOnly": True},
        }
    types = {
        "activation_type": quantization.QuantType.QUInt8,
        "weight_type": quantization.QuantType.QInt8,
    }
    quantization.quantize_static(
        str(prepared), str(path), Reader(), per_channel=True, **types, **options
    )
    return "onnxruntime.quantization"


def nncf(source: Path, path: Path, images: Sequence[Tensor], transformer: bool) -> str:
    """Quantize with OpenVINO's NNCF, by its defaults for the kind of model; write ``.xml``."""
    import nncf as tool
    import openvino

    logging.getLogger("nncf").setLevel(logging.ERROR)
    model = openvino.Core().read_model(str(source))
    kind = tool.ModelType.TRANSFORMER if transformer else None
    data = tool.Dataset([image.numpy() for image in images])
    openvino.save_model(
        tool.quantize(model, data, model_type=kind, subset_size=len(images)),
        str(path),
        compress_to_fp16=False,
    )
    return "nncf"


#: Runtime -> its maker's quantizer and the suffix of the file that it writes.
VENDORS: dict[str, tuple[Callable[[Path, Path, Sequence[Tensor], bool], str], str]] = {
    "onnxruntime": (onnxruntime_static, ".onnx"),
    "openvino": (nncf, ".xml"),
}
