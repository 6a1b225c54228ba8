"""Combining the statistics of several processes with torch.distributed.

Every rank issues the same collectives in the same order, whatever data it has seen. The ranks
first agree on the calibrators and their shapes. Then all observers advance in lock step, and
their requests of one kind travel together. Only all-reduce is used, so every backend works. The
traffic depends on the number of calibrators, groups and bins, never on the amount of data.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from torchq.calib.calibrator import Calibrator
from torchq.calib.observer import Exchange, Observer, Reduce
from torchq.errors import CalibrationError

# The most elements of one collective, unless a single tensor has more.
_BUCKET = 1 << 22
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
        nonfinite = link.reduce("sum", [observers[i].nonfinite for i in seen])
        tracking = [observers[i] for i in seen if observers[i].tracks_negative]
        negative = link.reduce("sum", [_negative_batches(observer) for observer in tracking])
        _run_exchanges(link, [observers[i].exchange(counts[i], link.rank) for i in seen])
        for i, bad in zip(seen, nonfinite, strict=True):
            observers[i].nonfinite = bad
            observers[i].batches = sum(counts[i])
        for observer, count in zip(tracking, negative, strict=True):
            observer.negative = count


def _negative_batches(observer: Observer) -> Tensor:
    """Return the number of tensors with negative values of a prepared observer."""
    assert observer.nonfinite is not None
    return torch.zeros_like(observer.nonfinite) if observer.negative is None else observer.negative


class _Link:
    """Reductions over one process group: in buckets, on one device, with a time limit."""

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

    def reduce(self, op: str, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Return each tensor reduced over the ranks ("max" or "sum"), on its own device.

        They have one dtype, and are sent in buckets of about 16 MB, or of one larger tensor.
        """
        results: list[Tensor] = []
        bucket: list[Tensor] = []
        for tensor in tensors:
            assert tensor is not None
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET:
                results += self._reduce_bucket(op, bucket)
                bucket = []
            bucket.append(tensor)
        return results + (self._reduce_bucket(op, bucket) if bucket else [])

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return, for each value, the list of the values on all ranks."""
        table = torch.zeros(len(values), self.world_size, dtype=torch.int64)
        table[:, self.rank] = torch.tensor(values, dtype=torch.int64)
        return self.reduce("sum", [table])[0].tolist()

    def _reduce_bucket(self, op: str, tensors: list[Tensor]) -> list[Tensor]:
        """Reduce several tensors of one dtype in one collective."""
        flat = torch.cat([t.to(self.device).reshape(-1) for t in tensors])
        reduce_op = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        try:
            work = dist.all_reduce(flat, reduce_op, group=self.group, async_op=True)
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise CalibrationError(
                f"sync: rank {self.rank} of {self.world_size} got no answer from the others "
                f"within the timeout of {self.timeout:g} s ({error}); expected every rank to "
                "take part. Look for the rank that failed first, or raise the timeout"
            ) from error
        parts = flat.split([t.numel() for t in tensors])
        return [
            part.view(t.shape).to(t.device, copy=True)
            for part, t in zip(parts, tensors, strict=True)
        ]


def _check_equal_observers(link: _Link, observers: list[Observer]) -> None:
    """Raise an error unless all ranks have the same number of observers with equal settings."""
    checksum = zlib.crc32(repr([observer.settings() for observer in observers]).encode())
    # A message of fixed size cannot itself have different shapes on different ranks. With the
    # negative of each number, one maximum gives both extremes.
    message = torch.tensor([len(observers), -len(observers), checksum, -checksum])
    most, minus_least, largest, minus_smallest = link.reduce("max", [message])[0].tolist()
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
    table = link.reduce("max", [table])[0]
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


def _run_exchanges(link: _Link, exchanges: list[Exchange]) -> None:
    """Run all exchanges in lock step; requests with one reduction and dtype travel together."""
    waiting: dict[Exchange, Reduce] = {exchange: next(exchange) for exchange in exchanges}
    while waiting:
        answers: dict[Exchange, Tensor] = {}
        for kind in sorted({_kind(request) for request in waiting.values()}):
            chosen = [e for e, request in waiting.items() if _kind(request) == kind]
            results = link.reduce(kind[0], [waiting[e].tensor for e in chosen])
            answers.update(zip(chosen, results, strict=True))
        waiting = _send_answers(answers, waiting)


def _kind(request: Reduce) -> tuple[str, str]:
    """Return what requests must share to travel in one collective."""
    return request.op, str(request.tensor.dtype)


def _send_answers(
    answers: dict[Exchange, Tensor], waiting: dict[Exchange, Reduce]
) -> dict[Exchange, Reduce]:
    """Send each exchange its answer; return the exchanges that continue, with their requests.

    The order of ``waiting``, which is the same on every rank, is kept.
    """
    continuing = {}
    for exchange in waiting:
        try:
            continuing[exchange] = exchange.send(answers[exchange])
        except StopIteration:
            continue
    return continuing
