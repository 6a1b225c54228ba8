"""The promises of every format, checked on every code and exactly between every two."""

from __future__ import annotations

import math
from itertools import pairwise

import torch

from tests.reference import E2M1, E2M3, E3M2, E4M3, E5M2, FloatSpec, integer_bounds
from torchq.formats import Format, IntFormat

__all__ = [
    "FLOAT_SPECS",
    "expected_values",
    "check_properties",
    "check_fixed_points",
    "check_between",
    "check_order",
    "check_limits",
]

FLOAT_SPECS: dict[str, FloatSpec] = {
    "e4m3": E4M3,
    "e5m2": E5M2,
    "e3m2": E3M2,
    "e2m3": E2M3,
    "e2m1": E2M1,
}
WORKING = (torch.float32, torch.float64)


def expected_values(format: Format) -> list[float]:
    """Return the distinct finite values in ascending order.

    They follow from the definitions: integer bounds, the OCP tables, powers of two.
    """
    if isinstance(format, IntFormat):
        low, high = integer_bounds(format.bits, not format.signed, format.narrow)
        return [float(value) for value in range(low, high + 1)]
    if format.name == "e8m0":
        return [2.0 ** (code - 127) for code in range(255)]
    return sorted(
        {
            value + 0.0
            for value in FLOAT_SPECS[format.name].values()
            if math.isfinite(value)
        }
    )


def _even(format: Format, low: float, high: float) -> float:
    """Return the neighbour whose code is even; where there is no mantissa, the larger."""
    if isinstance(format, IntFormat):
        return low if low % 2 == 0 else high
    if format.name == "e8m0":
        return high
    spec = FLOAT_SPECS[format.name]
    codes = {abs(spec.decode(code)): code for code in range(spec.num_codes // 2)}
    return low if codes[abs(low)] % 2 == 0 else high


def check_properties(format: Format) -> None:
    """Bounds, width and the list of values agree with the definition."""
    values = expected_values(format)
    assert list(format.values) == values
    assert (format.quant_min, format.quant_max) == (values[0], values[-1])
    assert format.qmax == format.quant_max
    assert (
        len(values) <= 2**format.bits < 2 * len(values) + 4
    )  # E5M2 spends eight codes on infinities, NaNs and -0
    assert format.is_integer == isinstance(format, IntFormat)
    assert format.signed == (values[0] < 0)
    assert str(format) == format.name


def check_fixed_points(format: Format) -> None:
    """Every value is its own nearest value; snapping works in place."""
    for dtype in WORKING:
        x = torch.tensor(expected_values(format), dtype=dtype)
        before = x.clone()
        assert format.snap_(x).data_ptr() == x.data_ptr()
        assert torch.equal(x, before)


def check_between(format: Format) -> None:
    """Half-way points go to the even neighbour, the floats next to them to the nearer one."""
    pairs = list(pairwise(expected_values(format)))
    for dtype in WORKING:
        low, high = torch.tensor(pairs, dtype=dtype).unbind(1)
        middle = low / 2 + high / 2  # exact: a format has far fewer bits than float32
        even = torch.tensor([_even(format, *pair) for pair in pairs], dtype=dtype)
        down = torch.tensor(-math.inf, dtype=dtype)
        up = torch.tensor(math.inf, dtype=dtype)
        assert torch.equal(format.snap_(middle.clone()), even)
        assert torch.equal(format.snap_(middle.nextafter(down)), low)
        assert torch.equal(format.snap_(middle.nextafter(up)), high)


def check_order(format: Format, generator: torch.Generator) -> None:
    """Snapping is monotone, lands on the grid, and is at most half a spacing away."""
    values = torch.tensor(expected_values(format))
    spread = torch.linspace(
        1.1 * format.quant_min - 1, min(1.1 * format.quant_max, 3e38), 5001
    )
    small = torch.randn(5000, generator=generator) * 3
    x = torch.cat([spread, small]).sort().values
    snapped = format.snap_(x.clone())
    assert bool((snapped.diff() >= 0).all())
    assert set(snapped.tolist()) <= set(values.tolist())
    distance = (
        (
            values.double()
            - x.double().clamp(format.quant_min, format.quant_max)[:, None]
        )
        .abs()
        .min(1)
        .values
    )
    assert torch.equal(
        (snapped.double() - x.double().clamp(format.quant_min, format.quant_max)).abs(),
        distance,
    )


def check_limits(format: Format) -> None:
    """Everything beyond the ends saturates, infinities too; NaN and empty tensors stay."""
    for dtype in WORKING:
        beyond = torch.tensor([format.quant_max, 3e38, math.inf], dtype=dtype)
        beyond = torch.cat(
            [
                beyond,
                torch.tensor([format.quant_max], dtype=dtype).nextafter(
                    torch.tensor(math.inf, dtype=dtype)
                ),
            ]
        )
        assert torch.equal(
            format.snap_(beyond), torch.full((4,), format.quant_max, dtype=dtype)
        )
        below = torch.tensor(
            [-1e38, -math.inf, math.nextafter(format.quant_min, -math.inf)], dtype=dtype
        )
        assert torch.equal(
            format.snap_(below), torch.full((3,), format.quant_min, dtype=dtype)
        )
        assert format.snap_(torch.tensor([math.nan], dtype=dtype)).isnan().all()
        assert format.snap_(torch.empty(0, 3, dtype=dtype)).shape == (0, 3)
