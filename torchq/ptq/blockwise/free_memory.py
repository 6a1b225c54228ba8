"""Memory that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import sys

__all__ = ["release_free_memory"]


def release_free_memory() -> bool:
    """Give freed memory back to the system; return True if there was any.

    The C library of Linux keeps freed blocks of up to 32 MiB, so a program that allocates and frees
    tensors of many sizes holds several times what it uses. Elsewhere nothing happens.

    Example:
        >>> release_free_memory() in (True, False)
        True
    """
    if sys.platform != "linux":
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only in the GNU C library
    return trim is not None and bool(trim(0))
