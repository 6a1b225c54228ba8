"""How one tensor is quantized, as a frozen value."""

from torchq.descriptor.descriptor import QuantDescriptor

__all__ = ["QuantDescriptor"]
