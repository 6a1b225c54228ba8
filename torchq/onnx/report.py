"""The report of an export."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torchq.onnx.ir import Model, float_size, opset_of
from torchq.onnx.qdq import quantizer_nodes, read_record, weight_nodes
from torchq.utils import bullets


@dataclass(frozen=True)
class ExportReport:
    """The file that :func:`torchq.export_onnx` wrote.

    Attributes:
        path: The file.
        target: The runtime that it was shaped for, or None for plain Q/DQ.
        opset: Version of the default ONNX domain.
        exporter: ``"dynamo"`` or ``"torchscript"``.
        size: Bytes on disk, with external data.
        float_size: Bytes that the same stored tensors occupy in float32.
        activations: Names of the quantizers of activations in the file.
        weights: Names of the quantizers whose weights are stored as integers or FP8.
        merged: Quantizers whose Q/DQ nodes another quantizer provides, because both had the same
            input and range: name -> name of the provider.
        warnings: Rules of the target that the model does not follow; each names a layer and a fix.
        notes: What the target has to say of the file, such as how to run it.
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
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        share = ""
        if self.float_size:
            percent = f"{self.size / self.float_size:.0%}"
            share = f" ({percent} of {_megabytes(self.float_size)} in float32)"
        lines = [
            f"{self.path}: {_megabytes(self.size)}{share}",
            f"opset {self.opset}, {self.exporter} exporter, target {self.target or 'any'}",
            f"{len(self.weights)} weights stored quantized, "
            f"{len(self.activations)} activations quantized, {len(self.merged)} merged",
            *self.notes,
        ]
        if self.warnings:
            lines += ["warnings:", bullets(self.warnings)]
        return "\n".join(lines)


def report_on(
    model: Model,
    path: Path,
    target: str | None,
    exporter: str,
    size: int,
    warnings: tuple[str, ...],
) -> ExportReport:
    """Return the report on a file, with names from its graph and its record."""
    merged = dict(read_record(model).get("merged", {}))
    weights = [*weight_nodes(model)]
    weights += [name for name, provider in merged.items() if provider in weights]
    return ExportReport(
        path=path,
        target=target,
        opset=opset_of(model),
        exporter=exporter,
        size=size,
        float_size=float_size(model),
        activations=tuple(quantizer_nodes(model)),
        weights=tuple(weights),
        merged=merged,
        warnings=warnings,
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
