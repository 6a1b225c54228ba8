"""What an export did, to read and to print."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ExportReport"]


@dataclass(frozen=True)
class ExportReport:
    """The file that :func:`torchq.export_onnx` or :func:`torchq.retarget_onnx` wrote.

    Attributes:
        path: the file.
        target: the runtime it was shaped for, or None for plain Q/DQ.
        opset: of the default ONNX domain.
        exporter: ``"dynamo"``, ``"torchscript"`` or ``"file"``.
        size: bytes on disk, with external data.
        float_size: bytes that the same initializers take in float32.
        activations: names of the quantizers of activations that are in the file.
        weights: names of the quantizers whose weights are stored as integers (or FP8).
        merged: quantizers whose nodes another one provides, as they had the same input and range: name -> provider.
        warnings: rules of the target that the model does not follow; each names a layer and a fix.
    """

    path: Path
    target: str | None
    opset: int
    exporter: str
    size: int
    float_size: int
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    merged: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = (
            f" ({self.size / self.float_size:.0%} of {_megabytes(self.float_size)} in float32)"
            if self.float_size
            else ""
        )
        lines = [
            f"{self.path}: {_megabytes(self.size)}{share}",
            f"opset {self.opset}, {self.exporter} exporter, target {self.target or 'any'}",
            f"{len(self.weights)} weights stored quantized, {len(self.activations)} activations quantized, {len(self.merged)} merged",
        ]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
