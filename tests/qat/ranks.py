"""What every rank of tests/qat/test_ranks.py runs."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import torchq
from tests.models import Parts
from torchq.workflow import quantizers


class Net(Parts):
    """Two convolutions and a head, without BatchNorm: ranks may not agree on its statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x).relu()).relu().mean((2, 3)))


def data(rank: int) -> list[Tensor]:
    """Return batches that differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    return [(1 + rank) * torch.randn(4, 3, 8, 8, generator=generator) for _ in range(5)]


def prepared(rank: int, *, learn: bool) -> tuple[nn.Module, Any]:
    """Return the same model on every rank, calibrated on the data of both, and its groups."""
    torch.manual_seed(0)
    model = Net(
        stem=nn.Conv2d(3, 4, 3),
        body=nn.Conv2d(4, 4, 3),
        head=nn.Linear(4, 2),
    )
    recipe = torchq.recipes.integer(4, 8, learn_ranges=learn)
    group = dist.group.WORLD
    done = torchq.qat.prepare(
        model, data(rank), recipe, lr=0.05, group=group, progress=False
    )
    return model, done.param_groups


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for x in data(rank):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def state(model: nn.Module) -> dict[str, Tensor]:
    actual = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        actual[name] = whole.detach().clone()
    return actual


def main(folder: Path) -> None:
    rank = dist.get_rank()
    results: dict[str, Any] = {}
    for name, learn in (("ddp fixed", False), ("ddp learned", True)):
        model, groups = prepared(rank, learn=learn)
        results[f"{name} before"] = state(model)
        wrapped = DistributedDataParallel(model, find_unused_parameters=False)
        train(wrapped, torch.optim.SGD(groups), rank)
        results[name] = state(model)
    model, groups = prepared(rank, learn=False)
    results["fsdp fixed before"] = state(model)
    mesh = init_device_mesh("cpu", (2,))
    for part in (model.stem, model.body, model.head, model):
        fully_shard(part, mesh=mesh)
    # Sharding replaces parameters, so the groups are made again, of the same rates.
    rates = {group["name"]: group["lr"] for group in groups}
    groups = torchq.qat.param_groups(model, lr=rates["weights"], weight_decay=1e-4)
    train(model, torch.optim.SGD(groups), rank)
    results["fsdp fixed"] = state(model)
    results["quantizers"] = list(quantizers(model))
    torch.save(results, folder / f"rank{rank}.pt")
