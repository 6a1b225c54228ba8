"""A table of what is quantized and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchq.nn import QuantModule, TensorQuantizer

__all__ = ["LayerRow", "Summary", "SummaryRow", "summary"]


@dataclass(frozen=True)
class SummaryRow:
    """One quantizer: its dotted path, the class of its owner, format and granularity, range, and mode."""

    name: str
    owner: str
    descriptor: str
    amax: str
    mode: str


@dataclass(frozen=True)
class LayerRow:
    """One layer of a deployed model: its path and class, the kernel that runs it, bytes of its parameters, and a note (what is
    fused into it, or why it has no integer kernel)."""

    name: str
    layer: str
    kernel: str
    bytes: int
    note: str


@dataclass(frozen=True)
class Summary:
    """Rows to read, and to print.

    Attributes:
        rows: one for each quantizer.
        float_modules: paths of the modules with weights that stay float.
        layers: one for each layer that :func:`torchq.deploy` has treated.
    """

    rows: tuple[SummaryRow, ...]
    float_modules: tuple[str, ...]
    layers: tuple[LayerRow, ...] = ()

    def __str__(self) -> str:
        if self.layers:
            return self._deployed()
        table = [
            ("quantizer", "in", "format", "amax", "mode"),
            *((r.name, r.owner, r.descriptor, r.amax, r.mode) for r in self.rows),
        ]
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        left = (
            f"float: {', '.join(self.float_modules)}"
            if self.float_modules
            else "no layer with weights is left in float"
        )
        return "\n".join(
            [
                *lines,
                left,
                "simulated: tensors are rounded to these formats but stored and computed in floating point",
            ]
        )

    def _deployed(self) -> str:
        table = [("layer", "class", "kernel", "bytes", "note")]
        table += [(r.name, r.layer, r.kernel, f"{r.bytes:,}", r.note) for r in self.layers]
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        left = [f"float: {', '.join(self.float_modules)}"] if self.float_modules else []
        return "\n".join(
            [
                *lines,
                *left,
                f"{sum(r.bytes for r in self.layers):,} bytes in {len(self.layers)} layers",
            ]
        )


def summary(model: nn.Module) -> Summary:
    """What every quantizer of ``model`` does; of a deployed model, what every layer runs on. ``print`` it.

    A module may describe itself with a method ``summary_row() -> (kernel, bytes, note)``; a quantized module that
    :func:`torchq.deploy` has left simulating says why in its attribute ``deploy_note``.
    """
    rows, float_modules, layers = [], [], []
    owners = {id(child): module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            owner = owners.get(id(module))
            rows.append(
                SummaryRow(
                    name,
                    type(owner).__name__ if owner else "",
                    str(module.descriptor),
                    _range(module),
                    module.mode,
                )
            )
        elif callable(describe := getattr(module, "summary_row", None)):
            layers.append(LayerRow(name or "(root)", type(module).__name__, *describe()))
        elif note := getattr(module, "deploy_note", ""):
            size = sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))
            layers.append(
                LayerRow(name or "(root)", type(module).__name__, "simulated", size, note)
            )
        elif not isinstance(module, QuantModule) and any(
            p.dim() > 1 for p in module.parameters(recurse=False)
        ):
            float_modules.append(name or "(root)")
    return Summary(tuple(rows), tuple(float_modules), tuple(layers))


def _range(quantizer: TensorQuantizer) -> str:
    if quantizer.descriptor.dynamic:
        return "of each call"
    if not quantizer.calibrated:
        return "of each call (not calibrated)"
    if quantizer.amax.is_meta:
        return "meta"
    low, high = torch.aminmax(quantizer.amax.detach())
    return (
        f"{low:.4g}"
        if quantizer.amax.numel() == 1
        else f"{low:.4g} .. {high:.4g} ({quantizer.amax.numel()})"
    )
