"""The form of the codes of an activation, as a runtime has it."""

from typing import TypeVar

from torchq.descriptor import QuantDescriptor
from torchq.formats import PerTensor
from torchq.runtime import Codes

D = TypeVar("D", QuantDescriptor, None, QuantDescriptor | None)


def in_codes(descriptor: D, codes: Codes) -> D:
    """Return how a rule's activation is quantized for a runtime that has these codes.

    What a rule fixes stays; so do float formats, blocks and ranges of each call. The rest has a
    zero point where the runtime wants them: it is 0 where calibration sees no negative value, so
    the codes are those of an unsigned range then, and fit the ends of the data otherwise.
    """
    if descriptor is None or not isinstance(descriptor.num_bits, int):
        return descriptor
    if descriptor.unsigned == "auto":
        return descriptor if codes.unsigned else descriptor.replace(unsigned=False)
    if (
        not codes.unsigned
        or not is_open(descriptor)
        or descriptor.num_bits not in codes.widths
    ):
        return descriptor
    if codes.fitted and not descriptor.power_of_two:
        return descriptor.replace(unsigned=True, symmetric=False)
    return descriptor.replace(unsigned="auto")


def is_open(descriptor: QuantDescriptor | None) -> bool:
    """Return True for a signed integer range per tensor that a runtime may have in another form."""
    d = descriptor
    if d is None or not isinstance(d.num_bits, int) or d.unsigned or not d.symmetric:
        return False
    return (
        d.granularity == PerTensor()
        and d.amax is None
        and not (d.dynamic or d.narrow_range)
    )


def has_choice(descriptor: QuantDescriptor, codes: Codes) -> bool:
    """Return True for a range that is unsigned for this runtime if no value there is negative."""
    form = in_codes(descriptor, codes)
    return form.unsigned == "auto" or (is_open(descriptor) and not form.symmetric)


def in_file(descriptor: D, codes: Codes) -> D:
    """Return how a tensor is quantized where files have scales of a type of their own."""
    d = descriptor
    if (
        d is None
        or codes.scales is None
        or d.dynamic
        or d.block_scale_format is not None
    ):
        return descriptor
    return d.replace(scale_format=codes.scales)
