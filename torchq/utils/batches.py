"""The one check of what functions take as batches, and batches in memory."""

from collections.abc import Iterable, Mapping
from itertools import islice
from numbers import Integral
from typing import Any

from torch import Tensor

from torchq.errors import CalibrationError, ConfigError


def check_batches(where: str, batches: object, num_batches: Any = None) -> None:
    """Raise an error unless ``batches`` holds batches and ``num_batches`` is a number of them."""
    is_count = isinstance(num_batches, Integral) and not isinstance(num_batches, bool)
    if num_batches is not None and not (is_count and num_batches > 0):
        raise ConfigError(
            f"{where}: got num_batches={num_batches!r}; expected an integer of at least 1, or "
            "None for all batches"
        )
    is_one = isinstance(batches, (Tensor, Mapping, str)) or hasattr(
        batches, "__array__"
    )
    is_many = any(hasattr(batches, name) for name in ("__iter__", "__getitem__"))
    if is_one or not is_many:
        raise ConfigError(
            f"{where}: got a {type(batches).__name__} as batches; expected an iterable of batches. "
            "Pass [batch] for one batch"
        )


def kept_batches(
    where: str, batches: Iterable[object], num_batches: int | None = None
) -> list[Any]:
    """Return the batches as a list; no batch is an error. ``where`` is the function called."""
    check_batches(where, batches, num_batches)
    batch_list = list(islice(batches, num_batches))
    if not batch_list:
        raise CalibrationError(f"{where}: got no batch; expected at least one")
    return batch_list
