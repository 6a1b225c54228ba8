"""Whether a difference is more than a network makes of small changes.

Runtimes fuse nodes and choose other integer types for them, and some do it wrongly. A difference
alone proves nothing, as a deep network may amplify one value that is rounded the other way at a
tie. How far results move where the inputs change a little shows how much the network amplifies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

#: The relative error that is always allowed: -20 dB.
_TOLERANCE = 0.1
#: The standard deviation of the changes of inputs, relative to each value. Runtimes that round the
#: biases of convolutions to integers change about as much; the rounding of float32 is far less.
_CHANGE = 1e-3
#: How many changed inputs are tried, and how much larger an error may be than their largest one.
_TRIES, _FACTOR = 4, 2.0

Results = Sequence[Tensor]


def too_different(
    found: Results,
    expected: Results,
    run: Callable[[Mapping[str, Tensor]], Results],
    feeds: Mapping[str, Tensor],
) -> list[int]:
    """Return the numbers of results that differ more than small changes of the inputs explain."""
    suspects = [
        number
        for number, (got, wanted) in enumerate(zip(found, expected, strict=True))
        if not _distance(got, wanted)
        <= _TOLERANCE * float(wanted[wanted.isfinite()].double().norm())
    ]
    if not suspects:
        return []
    moved = [run(_changed(feeds, seed)) for seed in range(_TRIES)]
    return [
        number
        for number in suspects
        if not _distance(found[number], expected[number])
        <= _FACTOR * max(_distance(others[number], expected[number]) for others in moved)
    ]


def _changed(feeds: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return inputs with floating-point numbers that are changed a little; others stay."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _noisy(value, generator) if value.is_floating_point() else value
        for name, value in feeds.items()
    }


def _noisy(value: Tensor, generator: torch.Generator) -> Tensor:
    size = max(_CHANGE, torch.finfo(value.dtype).eps)  # bfloat16 would round less away.
    noise = torch.randn(value.shape, generator=generator, device="cpu")
    return (value * (1 + size * noise)).to(value)


def _distance(a: Tensor, b: Tensor) -> float:
    """Return the norm of the difference; equal NaNs and infinities have none.

    It is infinite for results of unlike shapes.
    """
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())
