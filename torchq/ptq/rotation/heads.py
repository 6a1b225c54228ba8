"""The rotation of the values inside each attention head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.graph import Call, Flow
from torchq.ptq.rotation.stream import Stream

__all__ = ["HeadSizes", "find_heads"]

_ATTENTION = "scaled_dot_product_attention"
# Functions that give elements other places, or repeat heads.
_LAYOUT = frozenset(
    [
        *("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten"),
        *(
            "expand",
            "repeat_interleave",
            "getitem",
            "unsqueeze",
            "swapaxes",
            "movedim",
            "to",
            "cat",
        ),
    ]
)


class HeadSizes(TorchFunctionMode):
    """Notes how many channels the values of each attention have.

    Attributes:
        sizes: one for each call, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == _ATTENTION:
            value = args[2] if len(args) > 2 else (kwargs or {}).get("value")
            self.sizes.append(value.shape[-1] if isinstance(value, Tensor) else 0)
        return func(*args, **(kwargs or {}))


def find_heads(flow: Flow, stream: Stream, sizes: list[int]) -> list[tuple[str, str, int]]:
    """Return the paths of the layers of values and outputs, and the size of a head, of attentions.

    Args:
        flow: of one run.
        stream: whose writers are searched.
        sizes: the size of a head of each attention.
    """
    readers = {id(layer) for layer in stream.layers()}
    attentions = [call for call in flow.calls if call.module is None and call.name == _ATTENTION]
    if len(attentions) != len(sizes):
        return []
    found = []
    for call, size in zip(attentions, sizes, strict=True):
        value = _before(flow, call.inputs[2]) if len(call.inputs) > 2 else None
        out = _after(flow, call)
        if value is None or out is None or out.name not in stream.writers:
            continue
        first, second = value.module, out.module
        assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
        fits = first.out_features % size == 0 and second.in_features % size == 0
        if id(first) in readers and fits:
            found.append((value.name, out.name, size))
    return found


def _before(flow: Flow, index: int) -> Call | None:
    """Return the Linear layer whose output, in another layout, the call ``index`` returns."""
    call = flow.calls[index]
    while not isinstance(call.module, nn.Linear):
        name = "" if call.module is not None else call.name.strip("_")
        is_layout = name in _LAYOUT and len(call.inputs) == 1
        # The values of a call without a past come last, behind an empty cache.
        if not call.inputs or not (is_layout or name == "cat"):
            return None
        call = flow.calls[call.inputs[-1]]
    return call


def _after(flow: Flow, call: Call) -> Call | None:
    """Return the Linear layer that alone reads a result in another layout."""
    while True:
        readers = flow.consumers(call)
        if len(readers) != 1:
            return None
        call = readers[0]
        if isinstance(call.module, nn.Linear):
            return call
        if call.module is not None or call.name.strip("_") not in _LAYOUT:
            return None
