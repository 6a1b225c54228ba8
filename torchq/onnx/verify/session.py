"""Whether a session computes what its file says, where its codes cannot be seen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

#: The relative error that float32 and a few codes at ties explain.
EQUAL = 1e-3
#: The same for files whose model rounds no biases as the kernels do: half a step of each.
EQUAL_BUT_FOR_BIASES = 5e-3
#: Inputs are changed by this share of themselves, which moves about one code in 500.
_NOISE = 3e-5

Run = Callable[[Mapping[str, Tensor]], Sequence[Tensor]]


def unlike_written(
    written: Run,
    feeds: Mapping[str, Tensor],
    found: Sequence[Tensor],
    most: float = EQUAL,
) -> str:
    """Return how results of a session differ from those of its file, run node by node; or "".

    A deep network amplifies values that are rounded the other way at a tie, so results may differ
    by twice as much as those of the file do where its inputs change a little. A relative error of
    ``most`` is always allowed.
    """
    expected = list(written(feeds))
    far = [
        n
        for n, pair in enumerate(zip(found, expected, strict=True))
        if _share(*pair) > most
    ]
    if not far:
        return ""
    # What lies at a tie falls the other way for one of two opposite changes.
    moved = [
        list(written({name: _changed(value, noise) for name, value in feeds.items()}))
        for noise in (_NOISE, -_NOISE)
    ]
    for number in far:
        share = _share(found[number], expected[number])
        allowed = 2 * max(
            _share(results[number], expected[number]) for results in moved
        )
        if not share <= allowed:
            return (
                f"result {number} is {-20 * math.log10(share):.1f} dB from that of the file as it "
                "is written"
                if 0 < share < math.inf
                else f"result {number} is another one than that of the file as it is written"
            )
    return ""


def _share(got: Tensor, want: Tensor) -> float:
    """Return the error of floating-point numbers over their size; 0 for others and equal ones."""
    if got.shape != want.shape:
        return math.inf
    if not want.is_floating_point():
        return 0.0
    exact = want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    error = float((got.double() - exact).masked_fill(same, 0).norm())
    size = float(exact.masked_fill(~exact.isfinite(), 0).norm())
    if error == 0:
        return 0.0
    return error / size if size and math.isfinite(error) else math.inf


def _changed(x: Tensor, share: float) -> Tensor:
    """Return floating-point numbers with a little noise; others as they are."""
    if not x.is_floating_point():
        return x
    noise = torch.randn(
        x.shape, generator=torch.Generator().manual_seed(0), device="cpu"
    )
    return (x * (1 + share * noise)).to(x.dtype)
