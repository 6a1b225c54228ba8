"""The form of the codes of an activation, as a runtime has it."""

from __future__ import annotations

from typing import TypeVar

from torchq.descriptor import QuantDescriptor
from torchq.formats import PerTensor
from torchq.runtime import Codes

D = TypeVar("D", QuantDescriptor, None, QuantDescriptor | None)


def in_codes(descriptor: D, codes: Codes) -> D:
    """Return how a rule's activation is quantized for a runtime that has these codes.

    What a rule fixes stays; so do float formats, blocks and ranges of each call.
    """
    if descriptor is None or not isinstance(descriptor.num_bits, int):
        return descriptor
    if descriptor.unsigned == "auto":
        return descriptor if codes.unsigned else descriptor.replace(unsigned=False)
    d, is_fixed = descriptor, descriptor.unsigned or not descriptor.symmetric
    is_plain = d.granularity == PerTensor() and d.amax is None and not (d.dynamic or d.narrow_range)
    if not codes.unsigned or is_fixed or not is_plain or d.num_bits not in codes.widths:
        return descriptor
    return descriptor.replace(unsigned="auto")


def in_file(descriptor: D, codes: Codes) -> D:
    """Return how a tensor is quantized where files have scales of a type of their own.

    Scales that are rounded already, or taken from each call, stay.
    """
    d = descriptor
    if d is None or codes.scales is None or d.dynamic or d.block_scale_format is not None:
        return descriptor
    return d.replace(scale_format=codes.scales)
