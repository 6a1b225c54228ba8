"""Calibrate on several processes: each sees its own data, and all get the same ranges.

torchrun --nproc-per-node 2 examples/distributed_calibration.py
"""

from __future__ import annotations

import argparse

import torch
from torch import distributed, nn

import torchq


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--batches", type=int, default=8, help="of all processes together"
    )
    options = parser.parse_args()

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(1)
    data = [
        torch.randn(4, 3, 16, 16, generator=generator) for _ in range(options.batches)
    ]

    settings = {"target": "onnxruntime", "example": data[0]}
    model = network()
    torchq.quantize_(model, **settings)
    group = distributed.group.WORLD
    torchq.calibrate(
        model, data[rank::ranks], method="entropy", group=group, progress=False
    )

    # One process that sees all the data finds the same ranges, to the last bit.
    alone = network()
    torchq.quantize_(alone, **settings)
    torchq.calibrate(alone, data, method="entropy", progress=False)
    pairs = zip(model.state_dict().values(), alone.state_dict().values(), strict=True)
    same = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    print(f"rank {rank} of {ranks}: {'equal to one process' if same else 'different'}")
    distributed.barrier()  # No process leaves while another still works for the group.
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
