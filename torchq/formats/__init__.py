"""Number formats and granularities as data.

:func:`torchq.functional.fake_quantize` asks a :class:`Format` alone for bounds and grid. A new one
is a line in ``format.py``.
"""

from torchq.formats.format import (
    CATALOG,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    INT4,
    INT8,
    INT16,
    POWER_OF_TWO,
    SCALE_TYPES,
    UINT4,
    UINT8,
    FloatFormat,
    Format,
    IntFormat,
    PowersOfTwo,
    ScaleType,
    by_bits,
    format_by_name,
    integer_format,
    power_of_two_below,
    scale_format_by_name,
)
from torchq.formats.granularity import Granularity, PerAxis, PerBlock, PerTensor
from torchq.formats.rounding import ROUNDINGS, check_rounding, round_, round_number

__all__ = [
    "CATALOG",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "INT4",
    "INT8",
    "INT16",
    "POWER_OF_TWO",
    "ROUNDINGS",
    "SCALE_TYPES",
    "UINT4",
    "UINT8",
    "FloatFormat",
    "Format",
    "Granularity",
    "IntFormat",
    "PerAxis",
    "PerBlock",
    "PerTensor",
    "PowersOfTwo",
    "ScaleType",
    "by_bits",
    "format_by_name",
    "check_rounding",
    "integer_format",
    "power_of_two_below",
    "round_",
    "round_number",
    "scale_format_by_name",
]
