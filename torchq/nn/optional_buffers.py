"""The buffers that modules have only where something was done to them: one table of all.

State dicts, files, copies, averages and ``restore_`` read it. A state dict that describes a module
says by its keys which of these buffers the module has: they are added and dropped as it says, and
brought to the shapes that it holds. Buffers of one group come together: a state dict that has one
of them and not the others is incomplete.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OptionalBuffer:
    """A buffer that a module may be without.

    Attributes:
        name: of the buffer, in its module.
        group: what it belongs to.
        absent: how a module is without it: the buffer is None, or has no elements, or is not
            registered at all.
        dtype: the type that it always has; None for any.
    """

    name: str
    group: str
    absent: Literal["none", "empty", "unregistered"]
    dtype: torch.dtype | None = None

    def drop(self, module: nn.Module, like: Tensor) -> None:
        """Let a module be without the buffer; ``like`` has its type, device and channels."""
        vars(module).pop(self.name, None)
        module._buffers.pop(self.name, None)
        if self.absent == "none":
            module.register_buffer(self.name, None)
        elif self.absent == "empty":
            # Averages copy one number a channel into this, which must not raise.
            shape = (0, *like.shape[:1])
            module.register_buffer(
                self.name, torch.empty(shape, dtype=like.dtype, device=like.device)
            )

    def make_room(self, module: nn.Module, value: Tensor, like: Tensor) -> None:
        """Let a module have the buffer, of the shape of ``value``; its numbers are not set."""
        self.drop(module, like)
        module._buffers.pop(self.name, None)
        dtype = self.dtype or (like.dtype if self.absent == "empty" else value.dtype)
        room = torch.empty(value.shape, dtype=dtype, device=like.device)
        module.register_buffer(self.name, room)


#: What multiplies the input of a quantizer first.
FACTORS = (OptionalBuffer("pre_quant_scale", "factors", "none"),)
#: A scale and a zero point that are held as they are.
HELD = (
    OptionalBuffer("held_scale", "held", "unregistered", torch.float32),
    OptionalBuffer("held_zero_point", "held", "unregistered", torch.int32),
)
#: What is added to the results of a layer, and what multiplies them.
CORRECTION = (
    OptionalBuffer("output_gain", "correction", "empty"),
    OptionalBuffer("output_shift", "correction", "empty"),
)
OPTIONAL = {buffer.name: buffer for buffer in (*FACTORS, *HELD, *CORRECTION)}

#: The entry of a state dict that holds what was quantized and how. It is no buffer of a module, and
#: nothing that is loaded into one.
RECORD = "torchq_record"


def is_record(key: str) -> bool:
    """Return True for the key of a record in a state dict, that of a whole model or of a part."""
    return key == RECORD or key.endswith(f".{RECORD}")


def follow_keys(
    module: nn.Module,
    buffers: Iterable[OptionalBuffer],
    state_dict: dict[str, object],
    prefix: str,
    like: Tensor,
) -> None:
    """Let a module have those of some optional buffers that a state dict has, in their types."""
    for buffer in buffers:
        key = prefix + buffer.name
        value = state_dict.get(key)
        if not isinstance(value, Tensor):
            buffer.drop(module, like)
        elif buffer.absent == "empty" and not value.numel():
            buffer.drop(module, like)
            state_dict[key] = value.new_empty(module.get_buffer(buffer.name).shape)
        else:
            if buffer.dtype is not None:
                state_dict[key] = value.to(buffer.dtype)
            buffer.make_room(module, value, like)


def lacking_keys(
    buffers: Iterable[OptionalBuffer], state_dict: Mapping[str, object], prefix: str
) -> list[str]:
    """Return the keys that a state dict lacks although it has another one of their group.

    One that holds nothing does not count: of tensors that share a memory, as all without elements
    do, some libraries save the first alone.
    """
    names = list(buffers)
    groups = {
        buffer.group
        for buffer in names
        if _holds(state_dict.get(prefix + buffer.name), buffer)
    }
    keys = [prefix + buffer.name for buffer in names if buffer.group in groups]
    return [key for key in keys if key not in state_dict]


def _holds(value: object, buffer: OptionalBuffer) -> bool:
    """Return True for an entry of a state dict that a module without the buffer would not have."""
    is_empty = isinstance(value, Tensor) and not value.numel()
    return value is not None and not (is_empty and buffer.absent == "empty")


def register_assigned(
    module: nn.Module,
    buffers: Iterable[OptionalBuffer],
    state_dict: Mapping[str, Any],
    prefix: str,
) -> None:
    """Make buffers again of what a load with ``assign`` left as attributes of a module."""
    for buffer in buffers:
        value = state_dict.get(prefix + buffer.name)
        if value is not None and buffer.name not in module._buffers:
            vars(module).pop(buffer.name, None)
            module.register_buffer(buffer.name, value)
