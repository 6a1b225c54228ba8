"""Joining the statistics of several processes with torch.distributed.

Every rank issues the same collectives in the same order, whatever it has seen: the ranks first agree on the calibrators and
their shapes, then all observers advance in lock step, and their requests of one kind travel together. Only all-reduce is used,
so any backend will do. The traffic depends on the number of calibrators, groups and bins, never on the amount of data.
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

__all__ = ["sync"]

# Elements of one collective, unless a single tensor has more.
_BUCKET = 1 << 22
_MAX_DIMS = 15
_UNSEEN = -(1 << 62)


def sync(
    calibrators: Sequence[Calibrator],
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str | None = None,
    timeout: float = 600.0,
    names: Sequence[str] | None = None,
) -> None:
    """Give every rank the statistics of all ranks, as if one process had collected rank 0's batches, then rank 1's, and so on.

    Collective: every rank of ``group`` calls it once, with equal calibrators in the same order, whether or not they have seen
    data. Afterwards ``compute_amax`` gives the same bits on every rank, and those of the single process. A second call would
    count the data of all ranks once for each rank.

    Args:
        calibrators: the calibrators, the same on every rank.
        group: a process group; None is the default one.
        device: where tensors are sent from; default the current CUDA device for an NCCL-only group, else the CPU.
        timeout: seconds to wait for the other ranks in each collective.
        names: a name for each calibrator, for error texts.

    Raises:
        CalibrationError: the calibrators or amax shapes of the ranks differ, or a rank did not answer in time (it has died, or
            failed before it came here).
    """
    link = _Link(group, device, timeout)
    observers = [calibrator.observer for calibrator in calibrators]
    with torch.inference_mode(False), torch.no_grad():
        _agree(link, observers)
        counts = link.gather([observer.batches for observer in observers])
        seen = [i for i, column in enumerate(counts) if any(column)]
        _share_shapes(
            link, observers, seen, names or [f"calibrator {i}" for i in range(len(observers))]
        )
        nonfinite = link.reduce("sum", [observers[i].nonfinite for i in seen])
        _advance(link, [observers[i].exchange(counts[i], link.rank) for i in seen])
        for i, bad in zip(seen, nonfinite, strict=True):
            observers[i].nonfinite = bad
            observers[i].batches = sum(counts[i])


class _Link:
    """Reductions over one process group: bucketed, on one device, with a time limit."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device | str | None, timeout: float
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise CalibrationError(
                "sync: got no process group; expected one. Start with torchrun and call init_process_group()"
            )
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise CalibrationError(
                "sync: this process is not in the group; expected a call from the group's ranks only"
            )
        if device is None:
            device = (
                torch.device("cuda", torch.cuda.current_device())
                if dist.get_backend(group) == "nccl"
                else torch.device("cpu")
            )
        self.group, self.device, self.timeout = group, device, timeout

    def reduce(self, op: str, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Each tensor reduced over the ranks, on its own device. All of one dtype; sent in buckets of some 16 MB or one tensor."""
        results: list[Tensor] = []
        bucket: list[Tensor] = []
        for tensor in tensors:
            assert tensor is not None
            if bucket and sum(t.numel() for t in bucket) + tensor.numel() > _BUCKET:
                results += self._reduce_together(op, bucket)
                bucket = []
            bucket.append(tensor)
        return results + (self._reduce_together(op, bucket) if bucket else [])

    def gather(self, values: list[int]) -> list[list[int]]:
        """For each value, the list of what every rank has."""
        table = torch.zeros(len(values), self.world, dtype=torch.int64)
        table[:, self.rank] = torch.tensor(values, dtype=torch.int64)
        return self.reduce("sum", [table])[0].tolist()

    def _reduce_together(self, op: str, tensors: list[Tensor]) -> list[Tensor]:
        flat = torch.cat([t.to(self.device).reshape(-1) for t in tensors])
        try:
            work = dist.all_reduce(
                flat,
                dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM,
                group=self.group,
                async_op=True,
            )
            assert work is not None
            work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise CalibrationError(
                f"sync: rank {self.rank} of {self.world} got no answer from the others within the timeout of {self.timeout:g} s ({error}); "
                "expected every rank to take part. Look for the rank that failed first, or raise the timeout"
            ) from error
        parts = flat.split([t.numel() for t in tensors])
        return [
            part.view(t.shape).to(t.device, copy=True)
            for part, t in zip(parts, tensors, strict=True)
        ]


def _agree(link: _Link, observers: list[Observer]) -> None:
    """Check that all ranks brought the same observers; a fixed-size message, so that it cannot itself be mismatched."""
    mark = zlib.crc32(repr([observer.settings() for observer in observers]).encode())
    mine = torch.tensor([len(observers), -len(observers), mark, -mark])
    most, least, high, low = link.reduce("max", [mine])[0].tolist()
    if most != -least or high != -low:
        raise CalibrationError(
            f"sync: got {len(observers)} calibrators on rank {link.rank} that differ from another rank's ({-least} to {most}); "
            "expected equal calibrators in equal order. Quantize and configure the model alike on every rank"
        )


def _share_shapes(
    link: _Link, observers: list[Observer], seen: list[int], names: Sequence[str]
) -> None:
    """Prepare the observers that saw data elsewhere only; check that the shapes agree."""
    table = torch.full((len(seen), 2, _MAX_DIMS + 1), _UNSEEN)
    for row, i in enumerate(seen):
        shape = observers[i].shape
        if shape is not None:
            padded = torch.tensor([len(shape), *shape] + [0] * (_MAX_DIMS - len(shape)))
            table[row] = torch.stack([padded, -padded])
    table = link.reduce("max", [table])[0]
    for i, (high, low) in zip(seen, table.tolist(), strict=True):
        if high != [-value for value in low]:
            raise CalibrationError(
                f"sync: {names[i]} has amax shapes that differ between ranks ({observers[i].shape} on rank {link.rank}); "
                "expected one shape. Choose an axis whose size is the same in every batch"
            )
        shape = tuple(high[1 : 1 + high[0]])
        mine = observers[i].nonfinite
        observers[i].prepare(shape, torch.device(link.device) if mine is None else mine.device)


def _advance(link: _Link, exchanges: list[Exchange]) -> None:
    """Run all exchanges in lock step; the requests of one step and kind travel together."""
    waiting: dict[Exchange, Reduce] = {exchange: next(exchange) for exchange in exchanges}
    while waiting:
        answers: dict[Exchange, Tensor] = {}
        kinds = sorted({(request.op, str(request.tensor.dtype)) for request in waiting.values()})
        for op, dtype in kinds:
            chosen = [
                e
                for e, request in waiting.items()
                if (request.op, str(request.tensor.dtype)) == (op, dtype)
            ]
            answers.update(
                zip(chosen, link.reduce(op, [waiting[e].tensor for e in chosen]), strict=True)
            )
        waiting = dict(_answered(answers, waiting))


def _answered(
    answers: dict[Exchange, Tensor], order: dict[Exchange, Reduce]
) -> list[tuple[Exchange, Reduce]]:
    """Send the answers in the common order; the exchanges that go on, with their next request."""
    going = []
    for exchange in order:
        try:
            going.append((exchange, exchange.send(answers[exchange])))
        except StopIteration:
            continue
    return going
