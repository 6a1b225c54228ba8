"""The program of every rank of tests/analysis/test_ranks.py.

It is started as ``python -m torch.distributed.run ... ranks.py FOLDER``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq


def network() -> nn.Module:
    """Return the same calibrated network on every rank."""
    torch.manual_seed(4)
    layers = nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 10)
    model = nn.Sequential(*layers)
    torchq.quantize_(model, torchq.recipes.integer(4, 6))
    torchq.calibrate(model, all_batches(), progress=False)
    return model


def all_batches() -> list[Tensor]:
    """Return five batches; the first rank has three of them."""
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(16, 12, generator=generator) for _ in range(5)]


def analysed(
    model: nn.Module, batches: list[Tensor], path: Path, group: Any = None
) -> dict[str, Any]:
    """Return what the functions of torchq.analysis find, as JSON data."""
    options: dict[str, Any] = {"group": group, "progress": False}
    plan = torchq.mixed_precision(
        model, batches, budget={"mean_bits": 5}, formats=[3, 4, 6, 8], **options
    )
    page = torchq.report(model, batches, path, plan=plan, **options)
    return {
        "errors": torchq.layer_errors(model, batches, **options).to_dict(),
        "fisher": torchq.sensitivity(model, batches, "fisher", **options).to_dict(),
        "sqnr": torchq.sensitivity(model, batches, **options).to_dict(),
        "plan": plan.summary(),
        "report": page.data,
    }


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    own = all_batches()[:3] if rank == 0 else all_batches()[3:]
    found = analysed(network(), own, folder / f"report{rank}.json", dist.group.WORLD)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
