"""What every rank of tests/workflow/test_calibrate_ranks.py runs."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torchq
from tests.workflow import test_averaged_ranges as averaged
from tests.workflow.test_added_operators import Spectrum, sounds
from tests.workflow.test_linear_factors import quantized as quantized_linear
from tests.workflow.test_linear_factors import rows
from torchq.errors import TorchqError
from torchq.swap import plan_of

METHODS = ("max", "moving_average", "percentile", "mse", "entropy")


class Net(nn.Module):
    """Two convolutions, the second for batches whose first value is large only, and a head.

    DistributedDataParallel broadcasts the buffers of the BatchNorm in the first forward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.branch = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x, large = self.norm(self.stem(x)).relu(), x.flatten()[0] > 100
        if large:
            x = x + self.branch(x)
        return self.head(x.mean((2, 3)))


def quantized() -> nn.Module:
    """The same weights on every rank."""
    torch.manual_seed(0)
    model = Net()
    torchq.quantize_(model)
    return model


def batches(rank: int) -> list[Tensor]:
    """Two batches for rank 0, three for rank 1; only rank 1 reaches the branch."""
    generator = torch.Generator().manual_seed(rank)
    data = [
        torch.randn(4, 3, 8, 8, generator=generator) * (1 + rank)
        for _ in range(2 + rank)
    ]
    for x in data:
        x[0, 0, 0, 0] = 200.0 * rank
    return data


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: q.amax.detach()
        for name, q in model.named_modules()
        if isinstance(q, torchq.TensorQuantizer)
    }


def calibrated(
    wrap: Callable[[nn.Module], nn.Module], data: Iterable[Tensor], **options: Any
) -> dict[str, Tensor] | str:
    """The ranges, or the text of the error."""
    model = quantized()
    wrapped = wrap(model)
    try:
        torchq.calibrate(wrapped, data, progress=False, **options)
    except TorchqError as error:
        return str(error)
    return ranges(model)


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.children():
        fully_shard(layer)
    return fully_shard(model)


def train_step(model: nn.Module, x: Tensor) -> float:
    loss = model(x).square().mean()
    loss.backward()
    return loss.item()


def without_group(
    data: list[Tensor], group: dist.ProcessGroup | None
) -> tuple[dict[str, Tensor] | str, list[str]]:
    """The ranges of this rank alone, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = calibrated(lambda model: model, data, group=group, on_unseen="disable")
    return found, [str(warning.message) for warning in caught]


def operators_left_float(batch_numbers: list[int]) -> tuple[Any, ...]:
    """What a joint calibration for a target leaves in float, and what a plan says then."""
    model = Spectrum()
    data = sounds()
    torchq.quantize_(model, target="onnxruntime", example=data[0], progress=False)
    own_batches = [data[number] for number in batch_numbers]
    report = torchq.calibrate(
        model, own_batches, group=dist.group.WORLD, progress=False
    )
    outcome = plan_of(model).outcome().to_dict()
    return report.operators.left_float, plan_of(model).modes, outcome


def ranges_averaged(batch_numbers: list[int]) -> tuple[Any, ...]:
    """What a joint calibration averages, and the numbers that quantizers have then."""
    model = averaged.quantized(0.0)
    group = dist.group.WORLD
    few = [averaged.samples(seed + 3) for seed in batch_numbers]
    report = averaged.calibrated(model, few, group=group)
    numbers = {n: b.clone() for n, b in model.named_buffers() if b.numel()}
    return report.averages, numbers


def factors_chosen(batch_numbers: list[int]) -> tuple[Any, ...]:
    """What factors a joint calibration chooses, and the numbers that quantizers have then."""
    model = quantized_linear("onnxruntime")
    own_batches = [rows()[number] for number in batch_numbers]
    report = torchq.calibrate(
        model, own_batches, group=dist.group.WORLD, progress=False
    )
    numbers = {k: v for k, v in model.state_dict().items() if "quantizer" in k}
    return report.factors, plan_of(model).to_dict(), numbers


def run(folder: Path) -> None:
    rank = dist.get_rank()
    world = dist.group.WORLD
    data = batches(rank)
    found: dict[str, Any] = {}
    for method in METHODS:
        found[method] = calibrated(
            lambda model: model, data, method=method, group=world
        )
    found["ddp"] = calibrated(DistributedDataParallel, data, group=world)
    found["ddp no batches"] = calibrated(
        DistributedDataParallel, data if rank else [], group=world
    )
    found["no batches"] = calibrated(
        lambda model: model, data if rank else [], group=world
    )
    bad = [x.clone() for x in data]
    if rank:
        bad[0][0, 0, 1, 1] = torch.nan
    found["nan"] = calibrated(lambda model: model, bad, group=world)
    one_shot = iter(data) if rank else data
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["one shot"] = calibrated(lambda model: model, one_shot, group=world)
    found["one shot warned"] = [str(warning.message) for warning in caught]
    found["unseen"] = calibrated(
        lambda model: model, data if not rank else [], group=world
    )
    found["alone"], found["warned"] = without_group(data, None)
    found["alone on purpose"], found["not warned"] = without_group(
        data, [dist.new_group([i]) for i in range(2)][rank]
    )
    for case, chosen in (
        ("one each", [rank]),
        ("rank 1 alone", [1, 2] if rank else []),
    ):
        found[f"operators, {case}"] = operators_left_float(chosen)
        found[f"factors, {case}"] = factors_chosen(chosen)
        found[f"averages, {case}"] = ranges_averaged(chosen)
    # Its forward gathers weights, so both ranks need as many batches and the same branches.
    same = (
        [torch.full_like(x, 150.0) + x for x in batches(0)]
        if not rank
        else [torch.full((4, 3, 8, 8), 170.0)] * 2
    )
    found["fsdp data"] = same
    model = quantized()
    wrapped = sharded(model)
    torchq.calibrate(wrapped, same, group=world, progress=False)
    found["fsdp ranges"] = ranges(model)
    found["fsdp loss"] = train_step(wrapped, same[0])
    torch.save(found, folder / f"rank{rank}.pt")
