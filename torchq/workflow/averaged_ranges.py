"""Ranges of activations that are averaged over samples, where the outputs are nearer to float then.

The largest value that any sample of a calibration shows is that of its rarest one. Where samples
differ much, as pictures do in a MobileNetV2 whose activations are cut at 6 in few of its layers, a
range that holds it leaves few codes to all others. The mean of what each sample reaches clips a
little of some and rounds the rest finer. It is as often wrong, as on all small networks for CIFAR.

So the run in float that finds the ranges also notes the ends of each sample. Both kinds of ranges
are compared at the outputs of the model, on samples of every batch, and averaged ones are kept
where these are nearer to those in float by more than clipping is known to deceive. Where rounding
makes little noise there, nothing is tried: a detection is a rare large value, and what is clipped
of it weighs little beside the background that is rounded finer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.formats import PerTensor
from torchq.nn import TensorQuantizer
from torchq.utils import device_of, undone_on_error, watching
from torchq.workflow.added_operators import (
    FewSamples,
    Sample,
    compared,
    error_of_gain,
    results_of,
)
from torchq.workflow.runs import Comparison, Runs

#: By how many dB the outputs must be nearer to float. The noise at the outputs of a detector of
#: faces fell by .9 dB with clipped ranges, and its detections got worse; where clipping helped, as
#: in MobileNetV2 and in two detectors of 80 classes, it fell by 1.5 dB and more.
_LEAST_GAIN = 1.5
#: The noise over the signal from which on it is tried, 30 dB. With less of it hardly an answer of
#: classifiers changes, and a detector at 36 dB had 5 dB less noise and lower scores with averages.
_NOTICED = 1e-3
#: The factor by which the noise of a handful of samples may be off.
_UNSURE = 2.0
#: By how many standard errors a handful must miss the gain, to be believed.
_STANDARD_ERRORS = 2.0
#: The part of a range that its average may be of, to be another one.
_NARROWER = 0.9
#: Samples that a tensor must have shown; the average of a few is no better known than the largest.
_FEWEST = 8
#: The method of ranges that is tried with averages.
_BY_ENDS = "max"


@dataclass(frozen=True)
class RangeChoice:
    """What calibration found out about ranges that are averaged over samples.

    Attributes:
        averaged: paths of the quantizers whose ranges are.
        tried: how many were when the outputs were compared.
        outputs: the outputs with the whole ranges and with the averaged ones.
    """

    averaged: tuple[str, ...] = ()
    tried: int = 0
    outputs: Comparison = field(default_factory=Comparison)

    @property
    def line(self) -> str:
        """Say in one line which ranges are averages, and what that does; "" where none is."""
        if not self.averaged:
            return ""
        does = "range is" if len(self.averaged) == 1 else "ranges are"
        return f"{len(self.averaged)} {does} averaged over samples: {self.outputs}"

    def without(self, whole: Iterable[str]) -> RangeChoice:
        """Return this less the quantizers whose ranges were made whole again."""
        taken = set(whole)
        return replace(self, averaged=tuple(n for n in self.averaged if n not in taken))


class SampleEnds:
    """The ends of what quantizers read, averaged over samples, in a run in float.

    A sample is what one index of the first dimension holds; of a tensor with fewer than two
    dimensions it is the whole.

    Args:
        chosen: path -> quantizer that calibration sets by what it observes.
        method: in place of that of the descriptors.
    """

    def __init__(
        self, chosen: Mapping[str, TensorQuantizer], method: str | None
    ) -> None:
        self.quantizers = {
            name: quantizer
            for name, quantizer in chosen.items()
            if method is None and _can_be_averaged(quantizer)
        }
        #: Path -> the count of samples, the sums of their smallest and largest numbers, and the
        #: smallest and largest of all with signs so that both are maxima.
        self._sums: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at what the quantizers read inside the ``with`` block."""
        seen = [(q, partial(self._see, n, q)) for n, q in self.quantizers.items()]
        with watching(seen, before=True):
            yield

    def _see(
        self, name: str, quantizer: TensorQuantizer, args: Any, kwargs: Any, _: None
    ) -> None:
        given: Tensor = args[0] if args else kwargs["x"]
        x = quantizer.scaled(given.detach())
        if not x.numel():
            return
        samples = x.flatten(1) if x.dim() > 1 else x.reshape(1, -1)
        low, high = torch.aminmax(samples, dim=1)
        # The range of a tensor holds 0.
        ends = torch.stack([low.clamp(max=0), high.clamp(min=0)]).float()
        count = ends.new_full((1,), float(ends.shape[1])).double()
        sums = torch.cat([count, ends.sum(1, dtype=torch.float64)])
        most = torch.stack([-ends[0].amin(), ends[1].amax()])
        if name in self._sums:
            sums = sums + self._sums[name]
            most = torch.maximum(most, self._most[name])
        self._sums[name] = sums
        self._most[name] = most

    def narrower(
        self, device: torch.device | None, group: dist.ProcessGroup | None
    ) -> dict[str, Tensor]:
        """Return path -> the averaged ends, where they are well within those of all samples."""
        names = list(self.quantizers)
        if not names:
            return {}
        none = torch.zeros(3, dtype=torch.float64, device=device)
        sums = torch.stack([self._sums.get(name, none) for name in names])
        most = torch.stack([self._most.get(name, none[:2].float()) for name in names])
        if group is not None:
            dist.all_reduce(sums, group=group)
            dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        ends_by_name = {}
        for name, (count, *totals), largest in zip(
            names, sums.tolist(), most.tolist(), strict=True
        ):
            if count < _FEWEST:
                continue
            low, high = (total / count for total in totals)
            if 0 < max(-low, high) < _NARROWER * max(largest):
                ends_by_name[name] = sums.new_tensor([low, high]).float()
        return ends_by_name


def _can_be_averaged(quantizer: TensorQuantizer) -> bool:
    """Return True for a quantizer of one range, by the ends of what it sees, of integer codes."""
    d = quantizer.descriptor
    is_plain = quantizer.delegate is None and d.fake_quant and not d.learn_amax
    by_ends = d.calib_method == _BY_ENDS and d.granularity == PerTensor()
    return is_plain and by_ends and d.format.is_integer


def choose_ranges_(
    runs: Runs,
    ends: SampleEnds,
    few: FewSamples,
    group: dist.ProcessGroup | None = None,
) -> RangeChoice:
    """Average ranges over samples where the outputs are nearer to float then, in place.

    Args:
        runs: a calibrated model, in eval mode.
        ends: what its quantizers read.
        few: samples of its batches.
        group: processes that decide together.

    Returns:
        What was found out, with the outputs before and after it.
    """
    model = runs.model
    # What holds factors by now reads other numbers than those that were seen.
    averages = {
        name: average
        for name, average in ends.narrower(device_of(model), group).items()
        if ends.quantizers[name].quantizing
        and ends.quantizers[name].pre_quant_scale is None
    }
    if not averages:
        return RangeChoice()
    ranges = [(ends.quantizers[name], average) for name, average in averages.items()]
    choice = RangeChoice(tried=len(averages))
    verdict = _verdict(model, ranges, few, group)
    if verdict.outputs is not None:
        choice = replace(choice, outputs=verdict.outputs)
    if not verdict.is_better:
        return choice
    _set_(ranges)
    few.forget_results()
    return replace(choice, averaged=tuple(averages))


@dataclass(frozen=True)
class _Verdict:
    """Whether averaged ranges stay, and the outputs that say so; None where noise alone did."""

    is_better: bool
    outputs: Comparison | None = None


#: Quantizers, each with its averaged ends.
_Ranges = Sequence[tuple[TensorQuantizer, Tensor]]


def _verdict(
    model: nn.Module, ranges: _Ranges, few: FewSamples, group: dist.ProcessGroup | None
) -> _Verdict:
    """Compare averaged ranges with the whole ones, first on a handful of samples.

    It drops what shows too little noise or no gain there, beyond what samples differ by, as on most
    networks. It keeps nothing: what averages clip may be in the samples that are not among them.
    """
    samples, before = few.of_first(), few.results_of_first()
    noise = _noise(model, samples, before, group)
    if noise is None or noise * _UNSURE <= _NOTICED:
        return _Verdict(False)
    with _averaged(ranges):
        after = results_of(model, samples)
    outputs = compared(model, samples, before, after, group)
    error = error_of_gain(model, samples, (before, after), group)
    if error is not None and outputs.gain + _STANDARD_ERRORS * error < _LEAST_GAIN:
        return _Verdict(False, outputs)
    # Other processes may have more samples than these. Here they may be all.
    are_all = few.first_are_all()
    samples, before = few.of_all(), few.results()
    noise = _noise(model, samples, before, group)
    if noise is None or noise <= _NOTICED:
        return _Verdict(False)
    if not are_all:
        with _averaged(ranges):
            after = results_of(model, samples)
    outputs = compared(model, samples, before, after, group)
    return _Verdict(outputs.gain >= _LEAST_GAIN, outputs)


def _noise(
    model: nn.Module,
    samples: Sequence[Sample],
    results: Sequence[Sequence[Tensor]],
    group: dist.ProcessGroup | None,
) -> float | None:
    """Return the noise in results over their signal; None where they cannot be compared."""
    exact = [sample.exact for sample in samples]
    return compared(model, samples, exact, results, group).after


class _TakenBack(Exception):
    """The ranges are what they were."""


@contextmanager
def _averaged(ranges: _Ranges) -> Iterator[None]:
    """Average ranges inside the ``with`` block."""
    quantizers = [quantizer for quantizer, _ in ranges]
    with suppress(_TakenBack), undone_on_error(*quantizers):
        _set_(ranges)
        yield
        raise _TakenBack


def _set_(ranges: _Ranges) -> None:
    for quantizer, average in ranges:
        quantizer.calibrate_on(average.to(quantizer.amax), _BY_ENDS)
