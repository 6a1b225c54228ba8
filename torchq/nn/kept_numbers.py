"""Numbers that are made once from tensors, and again when one of these holds others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from torchq.functional.kernels.dispatch import is_plain

T = TypeVar("T")


class KeptNumbers(Generic[T]):
    """What was made of some tensors on a CPU, as long as they hold the same numbers.

    The tensors are compared with copies of them: neither their identity nor their version tells of
    a write through ``.data``. A copy and a pickle of this object are empty: it belongs to one
    module, and what it holds can be made again.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: tuple[tuple[object, ...], tuple[Tensor | None, ...], T] | None = (
            None
        )

    def get(
        self,
        settings: tuple[object, ...],
        tensors: Sequence[Tensor | None],
        make: Callable[[], T],
    ) -> T:
        """Return what ``make`` returned for these settings and numbers, or returns now.

        Args:
            settings: objects that are never changed in place, compared by identity.
            tensors: on a CPU; compared by type, shape and numbers. NaN is never equal.
            make: reads them.
        """
        kept = self._kept  # Another thread may replace it meanwhile.
        if (
            kept is not None
            and _are_same(kept[0], settings)
            and _hold_same(kept[1], tensors)
        ):
            return kept[2]
        made = make()
        with torch.inference_mode(False), torch.no_grad():
            copies = tuple(t if t is None else t.detach().clone() for t in tensors)
        self._kept = (settings, copies, made)
        return made

    def __deepcopy__(self, memo: object) -> KeptNumbers[T]:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _are_same(first: tuple[object, ...], second: tuple[object, ...]) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):  # noqa: SIM110 - all() takes twice the time
        if a is not b:
            return False
    return True


def _hold_same(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
        elif a.dtype is not b.dtype or a.shape != b.shape or not torch.equal(a, b):
            return False
    return True


def are_plain_numbers(x: object) -> bool:
    """Return True for float32 numbers on a CPU that nothing records or differentiates now.

    Then a forward may compute with numbers that were kept, and read them as Python values.
    """
    return (
        type(x) is Tensor
        and x.dtype is torch.float32
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.onnx.is_in_onnx_export()
        and is_plain(x)
    )
