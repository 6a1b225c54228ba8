"""The record of version 2 that torchq 0.2.0 would have written of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.nn import shared_groups
from torchq.swap import plan_of
from torchq.workflow import quantizers


def record_of(model: nn.Module) -> dict[str, Any]:
    """Return the record of version 2 with all slots of shared quantizers."""
    data = plan_of(model).to_dict()
    rows = {row["names"][0]: row for row in data["decisions"] if not row.get("reason")}
    slots = ("class", "input", "weight", "output")
    operators = {
        path: {
            "class": entry["class"],
            "nodes": entry["sites"],
            "children": {
                child: _kind(rows[f"{path}.{child}" if path else child])
                for child in entry["sites"].values()
            },
        }
        for path, entry in data["operators"].items()
    }
    return {
        "version": 2,
        "fusions": data["fusions"],
        "modules": {
            path: {slot: row[slot] for slot in slots if slot in row}
            for path, row in rows.items()
            if "calls" not in row or "input" in row or "weight" in row
        },
        "calls": {
            path: {"class": row["class"], "sites": row["calls"]}
            for path, row in rows.items()
            if "calls" in row
        },
        "operators": operators,
        "quantizers": data["placed"],
        "shared": shared_groups(model),
        "modes": {path: q.mode for path, q in quantizers(model).items()},
    }


def _kind(row: dict[str, Any]) -> str:
    kind: str = row["class"].rpartition(".")[2]
    return f"{kind}:{row['ranges']}" if row.get("ranges", 1) > 1 else kind
