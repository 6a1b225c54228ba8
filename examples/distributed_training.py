"""Train a quantized network on several processes with DistributedDataParallel.

torchrun --nproc-per-node 2 examples/distributed_training.py
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import torchq


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images (16, 3, 16, 16) of one of three colours, which is their class."""
    labels = torch.randint(3, (16,), generator=generator)
    images = torch.randn(16, 3, 16, 16, generator=generator)
    images[torch.arange(16), labels] += 1
    return images, labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    options = parser.parse_args()

    distributed.init_process_group("gloo")  # "nccl" on GPUs
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    # Each process draws data of its own.
    generator = torch.Generator().manual_seed(rank)

    # All processes calibrate together, so that they start from the same ranges.
    model = network()
    loader = [batch(generator) for _ in range(4)]
    settings = {"lr": 0.05, "group": distributed.group.WORLD, "progress": False}
    # The target is where the trained model will run.
    prepared = torchq.qat.prepare(model, loader, target="onnxruntime", **settings)
    if rank == 0:
        print(prepared)

    trained = DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(prepared.param_groups, momentum=0.9)
    for step in range(options.steps):
        torchq.qat.freeze_bn_from_(model, step, options.steps - 10)
        images, labels = batch(generator)
        loss = nn.functional.cross_entropy(trained(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    # BatchNorm's statistics are those of each process; DDP sends those of rank 0 before a forward.
    for buffer in model.buffers():
        distributed.broadcast(buffer, 0)
    torchq.fuse_(model.eval(), images, progress=False)

    images, labels = batch(torch.Generator().manual_seed(1000))
    logits = model(images).detach()
    others = [torch.empty_like(logits) for _ in range(ranks)]
    distributed.all_gather(others, logits)
    same = all(torch.equal(other, logits) for other in others)
    correct = (logits.argmax(1) == labels).sum().item()
    print(
        f"rank {rank} of {ranks}: {correct} of 16 right, {'equal' if same else 'different'}"
    )
    distributed.barrier()  # No process leaves while another still works for the group.
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
