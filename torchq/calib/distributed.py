"""Combining the statistics of several processes with torch.distributed.

Every rank issues the same collectives in the same order, whatever data it has seen. The ranks
first agree on the calibrators and their shapes. Only all-reduce is used, so every backend works.
The traffic depends on the number of calibrators, groups and bins, never on the amount of data.
"""

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchq.calib.calibrator import Calibrator
from torchq.calib.observer import Observer
from torchq.errors import CalibrationError

_MAX_DIMS = 15


def sync(
    calibrators: Sequence[Calibrator],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = 600.0,
    names: Sequence[str] | None = None,
) -> None:
    """Give every rank the statistics of all ranks.

    Afterwards ``range`` gives the same bits on every rank: those of one process that
    collected the batches of rank 0, then those of rank 1, and so on.

    This is a collective: every rank of ``group`` calls it once, with equal calibrators in the
    same order, whether or not they have seen data. A second call would count the data of all
    ranks once for each rank.

    Args:
        calibrators: the calibrators, the same on every rank.
        group: a process group; None is the default group.
        device: the device that tensors are sent from; default: the current CUDA device for an
            NCCL group, otherwise the CPU.
        timeout: seconds to wait for the other ranks in each collective.
        names: a name for each calibrator, for error texts.

    Raises:
        CalibrationError: the calibrators or amax shapes of the ranks differ, or a rank did not
            answer in time because it ended or failed before it called this function.
    """
    link = _Link(group, device, timeout)
    names = names or [f"calibrator {i}" for i in range(len(calibrators))]
    observers: list[Observer] = []
    observer_names: list[str] = []
    for name, calibrator in zip(names, calibrators, strict=True):
        # An asymmetric range has two observers.
        observers.extend(calibrator.observers)
        observer_names.extend([name] * len(calibrator.observers))
    with torch.inference_mode(False), torch.no_grad():
        _check_equal_observers(link, observers)
        batches = _prepare(link, observers, observer_names)
        for observer, counts in zip(observers, batches, strict=True):
            if observer.nonfinite is None:  # No rank has data.
                continue
            if observer.tracks_negative:
                negative = observer.negative
                if negative is None:  # This rank has seen no batch.
                    negative = torch.zeros_like(observer.nonfinite)
                observer.negative = link.reduce("sum", negative)
            observer.nonfinite = link.reduce("sum", observer.nonfinite)
            observer.exchange(counts, link.rank, link.reduce)
            observer.batches = sum(counts)


class _Link:
    """Reductions over one process group, on one device, with a time limit."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str | None,
        timeout: float,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CalibrationError(
                "sync: got no process group; expected one. "
                "Start with torchrun and call init_process_group()"
            )
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        if self.rank < 0:
            raise CalibrationError(
                "sync: this process is not in the group; "
                "expected a call from the group's ranks only"
            )
        if device is None and dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        self.group = group
        self.device = device or torch.device("cpu")
        self.timeout = timeout

    def gather(self, values: Tensor) -> list[Any]:
        """Return the int64 values of all ranks, nested as they are, in the order of the ranks."""
        table = torch.zeros(
            self.world_size, *values.shape, dtype=torch.int64, device="cpu"
        )
        table[self.rank] = values
        return self.reduce("sum", table).tolist()

    def reduce(self, op: Literal["max", "sum"], tensor: Tensor) -> Tensor:
        """Return a tensor reduced over the ranks, on its own device."""
        sent = tensor.detach().to(self.device, copy=True).contiguous()
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        try:
            work = dist.all_reduce(sent, reduce_op, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise CalibrationError(
                f"sync: rank {self.rank} of {self.world_size} got no answer from the others "
                f"within the timeout of {self.timeout:g} s ({error}); expected every rank to "
                "take part. Look for the rank that failed first, or raise the timeout"
            ) from error
        return sent.to(tensor.device)


def _check_equal_observers(link: _Link, observers: list[Observer]) -> None:
    """Raise an error unless all ranks have the same number of observers with equal settings."""
    checksum = zlib.crc32(
        repr([observer.settings() for observer in observers]).encode()
    )
    # A message of fixed size cannot itself have different shapes on different ranks.
    by_rank = link.gather(torch.tensor([len(observers), checksum], device="cpu"))
    if any(of_rank != by_rank[0] for of_rank in by_rank):
        counts = [count for count, _ in by_rank]
        raise CalibrationError(
            f"sync: got {len(observers)} calibrators on rank {link.rank} that differ from "
            f"another rank's ({min(counts)} to {max(counts)}); expected equal calibrators in equal "
            "order. Quantize and configure the model alike on every rank"
        )


def _prepare(
    link: _Link, observers: list[Observer], names: Sequence[str]
) -> list[list[int]]:
    """Prepare the observers that only other ranks gave data to; return the batches of each rank."""
    # A row for each observer: its batches, the number of dimensions of its amax, their sizes.
    table = torch.zeros(len(observers), 2 + _MAX_DIMS, dtype=torch.int64, device="cpu")
    for row, observer in zip(table, observers, strict=True):
        if observer.shape is not None:
            entries = [observer.batches, len(observer.shape), *observer.shape]
            row[: len(entries)] = torch.tensor(entries, device="cpu")
    by_rank = link.gather(table)
    for i, observer in enumerate(observers):
        shapes = set()
        for of_rank in by_rank:
            batches, dims, *sizes = of_rank[i]
            if batches:
                shapes.add(tuple(sizes[:dims]))
        if len(shapes) > 1:
            raise CalibrationError(
                f"sync: {names[i]} has amax shapes that differ between ranks "
                f"({observer.shape} on rank {link.rank}); expected one shape. "
                "Choose an axis whose size is the same in every batch"
            )
        if shapes and observer.shape is None:
            observer.prepare(shapes.pop(), torch.device(link.device))
    return [[of_rank[i][0] for of_rank in by_rank] for i in range(len(observers))]
