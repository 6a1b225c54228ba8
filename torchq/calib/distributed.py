"""Combining the statistics of several processes with torch.distributed.

Every rank issues the same collectives in the same order, whatever data it has seen. The ranks
first agree on the calibrators and their shapes. Only all-reduce is used, so every backend works.
The traffic depends on the number of calibrators, groups and bins, never on the amount of data.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchq.calib.calibrator import Calibrator
from torchq.calib.observer import Observer
from torchq.errors import CalibrationError

_MAX_DIMS = 15
# Marks the row of an observer that saw no data on this rank; every real entry is larger.
_UNSEEN = -(1 << 62)


def sync(
    calibrators: Sequence[Calibrator],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = 600.0,
    names: Sequence[str] | None = None,
) -> None:
    """Give every rank the statistics of all ranks.

    Afterwards ``compute_amax`` gives the same bits on every rank: those of one process that
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
    observers = [calibrator.observer for calibrator in calibrators]
    names = names or [f"calibrator {i}" for i in range(len(observers))]
    with torch.inference_mode(False), torch.no_grad():
        _check_equal_observers(link, observers)
        counts = link.gather([observer.batches for observer in observers])
        seen = [i for i, batches in enumerate(counts) if any(batches)]
        _prepare_shapes(link, observers, seen, names)
        for i in seen:
            observer = observers[i]
            assert observer.nonfinite is not None
            if observer.tracks_negative:
                none = torch.zeros_like(observer.nonfinite)
                own = none if observer.negative is None else observer.negative
                observer.negative = link.reduce("sum", own)
            observer.nonfinite = link.reduce("sum", observer.nonfinite)
            observer.exchange(counts[i], link.rank, link.reduce)
            observer.batches = sum(counts[i])


class _Link:
    """Reductions over one process group, on one device, with a time limit."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None, timeout: float
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CalibrationError(
                "sync: got no process group; expected one. "
                "Start with torchrun and call init_process_group()"
            )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise CalibrationError(
                "sync: this process is not in the group; "
                "expected a call from the group's ranks only"
            )
        if device is None and dist.get_backend(group) == "nccl":
            device = torch.device("cuda", torch.cuda.current_device())
        self.group, self.device, self.timeout = group, device or torch.device("cpu"), timeout

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return, for each value, the list of the values on all ranks."""
        table = torch.zeros(len(values), self.world_size, dtype=torch.int64)
        table[:, self.rank] = torch.tensor(values, dtype=torch.int64)
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
    checksum = zlib.crc32(repr([observer.settings() for observer in observers]).encode())
    # A message of fixed size cannot itself have different shapes on different ranks. With the
    # negative of each number, one maximum gives both extremes.
    message = torch.tensor([len(observers), -len(observers), checksum, -checksum])
    most, minus_least, largest, minus_smallest = link.reduce("max", message).tolist()
    if most != -minus_least or largest != -minus_smallest:
        raise CalibrationError(
            f"sync: got {len(observers)} calibrators on rank {link.rank} that differ from "
            f"another rank's ({-minus_least} to {most}); expected equal calibrators in equal "
            "order. Quantize and configure the model alike on every rank"
        )


def _prepare_shapes(
    link: _Link, observers: list[Observer], seen: list[int], names: Sequence[str]
) -> None:
    """Check that shapes agree, and prepare the observers that only other ranks gave data to."""
    table = torch.full((len(seen), 2, _MAX_DIMS + 1), _UNSEEN)
    for row, i in enumerate(seen):
        shape = observers[i].shape
        if shape is not None:
            padded = torch.tensor([len(shape), *shape] + [0] * (_MAX_DIMS - len(shape)))
            table[row] = torch.stack([padded, -padded])
    table = link.reduce("max", table)
    for i, (largest, minus_smallest) in zip(seen, table.tolist(), strict=True):
        if largest != [-value for value in minus_smallest]:
            raise CalibrationError(
                f"sync: {names[i]} has amax shapes that differ between ranks "
                f"({observers[i].shape} on rank {link.rank}); expected one shape. "
                "Choose an axis whose size is the same in every batch"
            )
        shape = tuple(largest[1 : 1 + largest[0]])
        nonfinite = observers[i].nonfinite
        device = torch.device(link.device) if nonfinite is None else nonfinite.device
        observers[i].prepare(shape, device)
