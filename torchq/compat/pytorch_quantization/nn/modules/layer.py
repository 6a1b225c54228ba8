"""Base class of the legacy layers: their constructor, and the names of their quantizers."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from torchq.compat.pytorch_quantization.nn.modules._utils import pop_quant_desc_in_kwargs
from torchq.nn import QuantModule

__all__ = ["LegacyLayer"]


class LegacyLayer(QuantModule):
    """Base of the legacy layers, whose quantizers have names with a leading underscore.

    It stands between a mixin of ``_utils`` and a class of :mod:`torchq.nn` in the list of bases.

    Args:
        *args: positional arguments of the float class.
        **kwargs: keyword arguments of the float class, ``quant_desc_input``, and for layers with
            a weight ``quant_desc_weight``.

    Raises:
        LegacyTypeError: an unknown keyword.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        own = {
            key: kwargs.pop(key)
            for key in list(kwargs)
            if key in inspect.signature(self.float_class.__init__).parameters
        }
        input_only = not self.weight_slots
        descriptors = pop_quant_desc_in_kwargs(type(self), input_only=input_only, **kwargs)
        super(QuantModule, self).__init__(*args, **own)
        arguments = (descriptors,) if input_only else descriptors
        self.init_quantizer(*arguments)  # type: ignore[operator]

    def _quant(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantized input and weight; scripts with own convolutions call it."""
        return self.input_quantizer(input), self.weight_quantizer(self.weight)

    def detach_quantizers(self) -> None:
        """Remove the quantizers, which have a leading underscore here."""
        for slot in self.slots():
            delattr(self, f"_{slot}_quantizer")
        self.__dict__.pop("_fake_quant", None)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for slot in self.slots():  # the names in torchq's own modules
            new = f"{prefix}{slot}_quantizer."
            for key in [key for key in state_dict if key.startswith(new)]:
                state_dict[f"{prefix}_{slot}_quantizer.{key[len(new) :]}"] = state_dict.pop(key)
        super(QuantModule, self)._load_from_state_dict(state_dict, prefix, *args)
