"""A table of what is quantized and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchq.nn import QuantModule, TensorQuantizer

__all__ = ["Summary", "SummaryRow", "summary"]


@dataclass(frozen=True)
class SummaryRow:
    """One quantizer: its dotted path, the class of its owner, format and granularity, range, and mode."""

    name: str
    owner: str
    descriptor: str
    amax: str
    mode: str


@dataclass(frozen=True)
class Summary:
    """Rows to read, and to print.

    Attributes:
        rows: one for each quantizer.
        float_modules: paths of the modules with weights that stay float.
    """

    rows: tuple[SummaryRow, ...]
    float_modules: tuple[str, ...]

    def __str__(self) -> str:
        table = [("quantizer", "in", "format", "amax", "mode"), *((r.name, r.owner, r.descriptor, r.amax, r.mode) for r in self.rows)]
        widths = [max(len(row[i]) for row in table) for i in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
        left = f"float: {', '.join(self.float_modules)}" if self.float_modules else "no layer with weights is left in float"
        return "\n".join([*lines, left, "simulated: tensors are rounded to these formats but stored and computed in floating point"])


def summary(model: nn.Module) -> Summary:
    """What every quantizer of ``model`` does; ``print`` it."""
    rows, float_modules = [], []
    owners = {id(child): module for module in model.modules() for child in module.children()}
    for name, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            owner = owners.get(id(module))
            rows.append(SummaryRow(name, type(owner).__name__ if owner else "", str(module.descriptor), _range(module), module.mode))
        elif not isinstance(module, QuantModule) and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            float_modules.append(name or "(root)")
    return Summary(tuple(rows), tuple(float_modules))


def _range(quantizer: TensorQuantizer) -> str:
    if quantizer.descriptor.dynamic:
        return "of each call"
    if not quantizer.calibrated:
        return "of each call (not calibrated)"
    if quantizer.amax.is_meta:
        return "meta"
    low, high = torch.aminmax(quantizer.amax.detach())
    return f"{low:.4g}" if quantizer.amax.numel() == 1 else f"{low:.4g} .. {high:.4g} ({quantizer.amax.numel()})"
