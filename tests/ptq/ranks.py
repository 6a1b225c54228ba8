"""The program that every rank of tests/ptq/test_ranks.py runs.

Run it as ``python -m torch.distributed.run ... ranks.py FOLDER``. It writes its results to
FOLDER/rank<N>.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchq
from torchq.ptq import (
    RunOptions,
    adaround_,
    correct_bias_,
    gptq_,
    smooth_,
)


def batches(rank: int) -> list[Tensor]:
    """Return two batches for even ranks, and one for odd ones."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(16, 8, generator=generator) for _ in range(2 - rank % 2)]


def net(recipe: Any = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        model[0].weight[2] = 10.0
    if recipe is not None:
        torchq.quantize_(model, recipe)
    return model


def results(data: list[Tensor], group: Any) -> dict[str, dict[str, Tensor]]:
    """Return the state dict that each algorithm leaves."""
    run, found = RunOptions(group=group), {}
    model = net(torchq.recipes.integer(4, 8))
    smooth_(model, data, run=run, progress=False)
    torchq.calibrate(model, data, group=group, progress=False)
    found["smooth_"] = model.state_dict()
    for name in ("correct_bias_", "gptq_", "adaround_"):
        model = net(torchq.recipes.integer(3, 8))
        torchq.calibrate(model, data, group=group, progress=False)
        if name == "correct_bias_":
            correct_bias_(model, data, group=group, progress=False)
        elif name == "gptq_":
            gptq_(model, data, run=run, progress=False)
        else:
            adaround_(model, data, steps=4, run=run, progress=False)
        found[name] = model.state_dict()
    return found


if __name__ == "__main__":
    dist.init_process_group("gloo")
    number = dist.get_rank()
    torch.save(results(batches(number), dist.group.WORLD), Path(sys.argv[1]) / f"rank{number}.pt")
    dist.barrier()
