"""Runs of a model on the same batches, and what its outputs are beside those of the float model.

Each run starts with the random numbers, the batches and the state of the first: loaders that
shuffle, layers of noise and buffers that a forward writes give again what they gave. Where a loader
gives other batches all the same, the float model runs once more.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.graph import Forward, call_model, results_in, tensors_in
from torchq.utils import RandomState, device_of, state_kept, watching

#: Numbers of a result that are compared, evenly spread over it.
_COMPARED = 1 << 15
#: Numbers of a batch by which it is recognised, evenly spread over each of its tensors.
_RECOGNISED = 64


def spread(x: Tensor, count: int) -> Tensor:
    """Return at most ``count`` elements of a tensor, evenly spread, as a copy in one dimension."""
    flat = x.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // count))].clone()


def shortened(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of results that is compared."""
    return [spread(result, _COMPARED) for result in results]


class Fingerprint:
    """What tells a batch from others: the shape and some elements of each of its tensors."""

    def __init__(self, batch: Any) -> None:
        dense = [
            t for t in tensors_in(batch) if t.layout is torch.strided and not t.is_meta
        ]
        self._shapes = [tensor.shape for tensor in dense]
        self._elements = [spread(tensor, _RECOGNISED) for tensor in dense]

    def is_of(self, other: Fingerprint) -> bool:
        """Return True if two batches have the same shapes and elements."""
        if self._shapes != other._shapes:
            return False
        return all(map(torch.equal, self._elements, other._elements))


@dataclass
class Outputs:
    """What one version of a model returned: for each batch, in order, a part of its results."""

    batches: list[Fingerprint] = field(default_factory=list)
    results: list[list[Tensor]] = field(default_factory=list)

    def add(self, batch: Fingerprint, results: Sequence[Tensor]) -> None:
        """Keep a part of the results for the next batch."""
        self.batches.append(batch)
        self.results.append(shortened(results))

    def of(self, number: int, batch: Fingerprint) -> list[Tensor] | None:
        """Return the results for a batch; None if another one had this number."""
        is_known = number < len(self.batches) and self.batches[number].is_of(batch)
        return self.results[number] if is_known else None


class Runs:
    """A model and the batches that it runs on, several times.

    Args:
        model: any module.
        batches: read from the start in every run.
        forward: called as ``forward(model, batch)`` in place of the model.
    """

    def __init__(
        self, model: nn.Module, batches: Iterable[Any], forward: Forward | None
    ) -> None:
        self.model, self.batches, self.forward = model, batches, forward
        self._start = RandomState.now()
        self._device = device_of(model)

    def call(self, batch: object) -> list[Tensor]:
        """Run the model on a copy of a batch; return its floating-point results."""
        outputs: list[list[Tensor]] = []

        def see(args: object, kwargs: object, output: object) -> None:
            results = results_in(output)
            outputs.append(without_padding(self.model, args, kwargs, results))

        with watching([(self.model, see)]):
            returned = call_model(
                self.model, batch, forward=self.forward, device=self._device
            )
        # What a function of the user returns may be a loss, or nothing.
        return outputs[-1] if outputs else results_in(returned)

    def again(
        self,
        step: Callable[[int, Any], None],
        most: int | None,
        group: dist.ProcessGroup | None = None,
    ) -> int:
        """Take ``step(number, batch)`` for the first batches once more; return how many there were.

        Random numbers and the state of the model are those of the first run; at the end they are
        what they were before. In a group each rank takes as many steps as the one with the most,
        with ``NO_BATCH`` for the batches that it does not have.
        """
        after = RandomState.now()
        count = 0
        self._start.restore()
        try:
            with state_kept(self.model):
                chosen = _of_ranks(islice(self.batches, most), group, self._device)
                for number, batch in enumerate(chosen):
                    count += batch is not NO_BATCH
                    step(number, batch)
        finally:
            after.restore()
        return count


#: The argument by which models are told which positions of their input are filled up.
_MASK = "attention_mask"


def without_padding(
    model: nn.Module, args: Any, kwargs: Any, results: list[Tensor]
) -> list[Tensor]:
    """Return results of a call without those of positions that its mask calls filled up.

    Nobody reads what a model returns for these. A mask is the argument "attention_mask" of shape
    (samples, positions), and results with such positions have at least one dimension more.
    """
    mask = kwargs.get(_MASK)
    if mask is None and len(args) > 1:
        names = list(inspect.signature(model.forward).parameters)
        mask = dict(zip(names, args, strict=False)).get(_MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
        return results
    kept = mask.bool()
    return [
        r[kept.to(r.device)] if r.dim() > 2 and r.shape[:2] == mask.shape else r
        for r in results
    ]


#: What stands for a batch on a rank that has none left, while others do.
NO_BATCH = object()


def _of_ranks(
    batches: Iterable[object],
    group: dist.ProcessGroup | None,
    device: torch.device | None,
) -> Iterator[object]:
    """Yield the batches; in a group as often on each rank as on the one with the most."""
    if group is None:
        yield from batches
        return
    own_batches = iter(batches)
    while True:
        batch = next(own_batches, NO_BATCH)
        any_batch = torch.tensor(float(batch is not NO_BATCH), device=device)
        dist.all_reduce(any_batch, dist.ReduceOp.MAX, group=group)
        if not any_batch:
            return
        yield batch


@dataclass(frozen=True)
class Comparison:
    """What a change of a quantized model does to its outputs.

    Attributes:
        batches: how many were compared.
        before: the mean share of noise in its outputs without the change; None if they cannot be
            compared with those of the float model.
        after: the same with it.
    """

    batches: int = 0
    before: float | None = None
    after: float | None = None

    @property
    def is_worse(self) -> bool:
        """True if the outputs are further from those of the float model than without the change."""
        if self.before is None or self.after is None:
            return False
        return not self.after <= self.before

    @property
    def gain(self) -> float:
        """How much nearer to float the outputs are with the change, in dB; 0 if unknown."""
        if not self.before or self.after is None:
            return 0.0
        return 10 * math.log10(self.before / self.after) if self.after else math.inf

    def __str__(self) -> str:
        """Return the ratio of signal to noise without and with the change, and where it is from."""
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        if self.before is None or self.after is None:
            return f"the outputs of {batches} cannot be compared with those of the float model"
        return (
            f"output {_decibels(self.before)} -> {_decibels(self.after)} on {batches}"
        )


def _decibels(share: float) -> str:
    if share == 0:
        return "exact"
    return "not finite" if math.isinf(share) else f"{-10 * math.log10(share):.1f} dB"


class NoiseSums:
    """Sums of squares of results in float, and of what two versions differ from them by."""

    def __init__(self) -> None:
        self.batches = 0
        #: For each result (signal, noise without the change, noise with it).
        self._sums: list[Tensor] = []

    def add(
        self,
        reference: Sequence[Tensor],
        before: Sequence[Tensor],
        after: Sequence[Tensor],
        batches: int = 1,
    ) -> None:
        """Add the results of one batch, or of parts of several, those of equal shape."""
        self.batches += batches
        for number, (exact_output, old, new) in enumerate(
            zip(reference, before, after, strict=False)
        ):
            if number == len(self._sums):
                self._sums.append(exact_output.new_zeros(3, dtype=torch.float64))
            if exact_output.shape == old.shape == new.shape:
                finite = exact_output.isfinite()
                exact = exact_output[finite].double()
                errors = (
                    exact,
                    old[finite].double() - exact,
                    new[finite].double() - exact,
                )
                sums = torch.stack([error.square().sum() for error in errors])
                self._sums[number] = self._sums[number] + sums

    def comparison(self, group: dist.ProcessGroup | None, device: Any) -> Comparison:
        """Return the mean share of noise over the results, joined over ranks."""
        sums, batches = self._joined(group, device)
        with_signal = [noise for noise in sums.tolist() if noise[0] > 0]
        if not with_signal:
            return Comparison(batches)
        before, after = (
            sum(_share(noise[i], noise[0]) for noise in with_signal) / len(with_signal)
            for i in (1, 2)
        )
        return Comparison(batches, before, after)

    def _joined(
        self, group: dist.ProcessGroup | None, device: Any
    ) -> tuple[Tensor, int]:
        own_sums = (
            torch.stack(self._sums)
            if self._sums
            else torch.zeros(0, 3, dtype=torch.float64)
        )
        if group is None:
            return own_sums, self.batches
        results = torch.tensor(len(own_sums), device=device)
        batches = torch.tensor(self.batches, device=device)
        dist.all_reduce(results, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(batches, group=group)
        joined = torch.zeros(int(results), 3, dtype=torch.float64, device=device)
        joined[: len(own_sums)] = own_sums.to(joined.device)
        dist.all_reduce(joined, group=group)
        return joined, int(batches)


def _share(noise: float, signal: float) -> float:
    return math.inf if math.isnan(noise) else noise / signal
