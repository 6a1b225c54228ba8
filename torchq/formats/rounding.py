"""Rounding policies: which integer stands for a number between two.

They differ at ties alone, except ``up`` and ``down``, which go to one side always. All of them
compare the exact distance to the truncated number, never ``x + 0.5``. That sum would be rounded
itself: in float32 it makes 0.49999997 a tie, and 8388609 an even number.

=====================  ==========================================================
policy                 -2.5  -1.5  -0.5  0.5  1.5  2.5 become
=====================  ==========================================================
``half_even``          -2 -2 0 0 2 2 (IEEE 754, ONNX)
``half_up``            -2 -1 0 1 2 3
``half_down``          -3 -2 -1 0 1 2
``half_toward_zero``   -2 -1 0 0 1 2
``half_away``          -3 -2 -1 1 2 3
``up``                 -2 -1 0 1 2 3 (the smallest integer that is not below)
``down``               -3 -2 -1 0 1 2 (the largest integer that is not above)
=====================  ==========================================================
"""

import math

from torch import Tensor, trunc

from torchq.errors import ConfigError
from torchq.utils import short_repr

#: The names of all policies; the first one is the default everywhere.
ROUNDINGS = (
    "half_even",
    "half_up",
    "half_down",
    "half_toward_zero",
    "half_away",
    "up",
    "down",
)

# Policy -> do a positive and a negative tie move away from zero?
_TIES_MOVE = {
    "half_up": (True, False),
    "half_down": (False, True),
    "half_toward_zero": (False, False),
    "half_away": (True, True),
}


def check_rounding(name: object) -> None:
    """Raise an error unless ``name`` is one of :data:`ROUNDINGS`.

    Raises:
        ConfigError: it is not; the text lists them.
    """
    if name not in ROUNDINGS:
        raise ConfigError(
            f"rounding: got {short_repr(name)}; expected one of {', '.join(ROUNDINGS)}"
        )


def round_(x: Tensor, rounding: str = "half_even") -> Tensor:
    """Round to integers in place.

    Args:
        x: float32 or float64, any shape. NaN and infinities stay.
        rounding: one of :data:`ROUNDINGS`.

    Returns:
        ``x``.
    """
    if rounding == "half_even":
        return x.round_()
    if rounding == "up":
        return x.ceil_()
    if rounding == "down":
        return x.floor_()
    whole = trunc(x)
    above, below = _TIES_MOVE[rounding]
    fraction = x.sub_(whole)  # Exact: it has no more digits than x.
    up = fraction >= 0.5 if above else fraction > 0.5
    down = fraction <= -0.5 if below else fraction < -0.5
    return x.copy_(whole.add_(up.to(x.dtype)).sub_(down.to(x.dtype)))


def round_number(value: float, rounding: str = "half_even") -> int:
    """Return the integer for one finite number, as :func:`round_` does for tensors.

    Args:
        value: a finite number.
        rounding: one of :data:`ROUNDINGS`.

    Raises:
        ConfigError: an unknown policy.

    Example:
        >>> [round_number(-0.5, rounding) for rounding in ("half_up", "half_away", "half_even")]
        [0, -1, 0]
    """
    check_rounding(rounding)
    if rounding == "half_even":
        return round(value)
    if rounding in ("up", "down"):
        return math.ceil(value) if rounding == "up" else math.floor(value)
    whole = math.trunc(value)
    above, below = _TIES_MOVE[rounding]
    fraction = value - whole
    up = fraction >= 0.5 if above else fraction > 0.5
    down = fraction <= -0.5 if below else fraction < -0.5
    return whole + up - down
