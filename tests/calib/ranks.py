"""What every rank of tests/calib/test_distributed.py runs.

It writes its results to FOLDER/rank<N>.pt. At the end one rank stays away from a last call: with
two ranks it only waits, with more it is done.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchq.calib import Calibrator, methods, sync
from torchq.errors import TorchqError
from torchq.formats import PerAxis, PerTensor

CHANNELS = 6
# Channels of the widest histogram.
WIDE = 1000


def make_all() -> list[Calibrator]:
    """Return calibrators of every method, a wide one, and some that few ranks feed."""
    kinds = [
        Calibrator(method, granularity=granularity)
        for method in methods()
        for granularity in (PerTensor(), PerAxis((1,)))
    ]
    wide = Calibrator("percentile", granularity=PerAxis((1,)))
    kinds[0].track_negative()
    sparse = Calibrator(granularity=PerAxis((1,)))
    sparse.track_negative()
    return [
        *kinds,
        wide,
        sparse,
        Calibrator("histogram", num_bins=64),
        Calibrator("moving_average", momentum=0.5),
        Calibrator("histogram"),
    ]


def batches(rank: int, repeats: int = 1) -> list[Tensor]:
    """Return three batches for even ranks, two for odd ones, of ranges that rise by rank."""
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(7 * repeats, WIDE, generator=generator) * 4.0**rank
        for _ in range(3 - rank % 2)
    ]


def feed(calibrators: list[Calibrator], rank: int, repeats: int = 1) -> None:
    """Feed the calibrators: only rank 1 feeds the second to fourth last, no rank the last."""
    for batch in batches(rank, repeats):
        for i, calibrator in enumerate(calibrators[:-1]):
            if i < len(calibrators) - 4 or rank == 1:
                calibrator.collect(
                    batch if i >= len(calibrators) - 5 else batch[:, :CHANNELS]
                )


def amaxes(calibrators: list[Calibrator]) -> list[Tensor | None]:
    return [c.range().high if c.seen else None for c in calibrators]


def failure(*calibrators: Calibrator, timeout: float = 60.0) -> str:
    """Return the error text of a sync, or of the range that follows."""
    try:
        sync(
            calibrators,
            timeout=timeout,
            names=[f"layer{i}" for i in range(len(calibrators))],
        )
        for calibrator in calibrators:
            calibrator.range()
    except TorchqError as error:
        return str(error)
    return "none"


def with_data(calibrator: Calibrator, *tensors: Tensor) -> Calibrator:
    for x in tensors:
        calibrator.collect(x)
    return calibrator


def run(folder: Path) -> None:
    rank = dist.get_rank()
    world = dist.get_world_size()
    actual: dict[str, Any] = {**traffic_by_size(rank), **refusals(rank)}
    torch.save(actual, folder / f"rank{rank}.pt")

    ended = folder / "ended"
    if rank == world - 1:
        while world == 2 and not ended.exists():
            time.sleep(0.05)
        return
    start = time.monotonic()
    actual["absent"] = failure(with_data(Calibrator(), torch.ones(2)), timeout=1.0)
    actual["waited"] = time.monotonic() - start
    torch.save(actual, folder / f"rank{rank}.pt")
    ended.touch()


def traffic_by_size(rank: int) -> dict[str, Any]:
    """Return every calibrator's amax for little and for much data, and the traffic of both."""
    actual: dict[str, Any] = {}
    traffic: list[tuple[int, torch.dtype]] = []
    all_reduce = dist.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        traffic.append((tensor.numel(), tensor.dtype))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    for name, repeats in (("small", 1), ("large", 20)):
        calibrators = make_all()
        feed(calibrators, rank, repeats)
        traffic.clear()
        sync(calibrators)
        actual[name] = amaxes(calibrators)
        actual[f"{name} traffic"] = list(traffic)
        actual[f"{name} batches"] = [c.batches for c in calibrators]
        actual[f"{name} negative"] = [c.negative_batches for c in calibrators]
    dist.all_reduce = all_reduce
    return actual


def refusals(rank: int) -> dict[str, Any]:
    """Return results for inference mode, for no calibrators, and the errors of bad calls."""
    with torch.inference_mode():
        calibrator = with_data(
            Calibrator("histogram"),
            torch.ones(3) * (rank + 1),
        )
        sync([calibrator])
    nothing: list[Calibrator] = []
    sync(nothing)
    rows = PerAxis((0,))
    bad = torch.tensor([1.0, torch.nan if rank == 1 else 2.0])
    return {
        "inference": calibrator.range("max").high,
        "nan": failure(with_data(Calibrator(), bad)),
        "shape": failure(
            Calibrator(granularity=rows),
            with_data(Calibrator(granularity=rows), torch.ones(2 + rank, 5)),
        ),
        "kind": failure(Calibrator() if rank else Calibrator("histogram")),
        "number": failure(*[Calibrator() for _ in range(1 + rank)]),
    }
