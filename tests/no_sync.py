"""A detector of operators that make the host wait for the device; it works on the CPU as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["NoSync"]

# Reading a value, and results whose size depends on values.
_SYNCS = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "bincount",
    "item",
)


class NoSync(TorchDispatchMode):
    """Raises where an operator would make the host wait for the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, unless it waits."""
        name = func.overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            isinstance(i, Tensor) and i.dtype is torch.bool for i in args[1]
        )
        if (
            name in _SYNCS
            or masks
            or (
                name == "_to_copy"
                and (kwargs or {}).get("device") == torch.device("cpu")
            )
        ):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
