"""Mixins that give a module its quantizers.

Scripts derive their own modules from them, and call ``init_quantizer`` from any function.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from torchq.compat.errors import LegacyTypeError
from torchq.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer
from torchq.compat.pytorch_quantization.tensor_quant import (
    QUANT_DESC_8BIT_PER_TENSOR,
    QuantDescriptor,
)
from torchq.errors import ConfigError

__all__ = ["QuantInputMixin", "QuantMixin", "QuantizerList", "pop_quant_desc_in_kwargs"]


class QuantizerList(nn.ModuleList):
    """Quantizers that are switched together: one for each layer and direction of an LSTM."""

    def disable(self) -> None:
        """Disable each."""
        for quantizer in self:
            quantizer.disable()  # type: ignore[operator]

    def enable(self) -> None:
        """Enable each."""
        for quantizer in self:
            quantizer.enable()  # type: ignore[operator]


def _checked(descriptor: Any) -> QuantDescriptor:
    if not isinstance(descriptor, QuantDescriptor):
        raise ConfigError(
            f"default descriptor: got {descriptor!r}; expected an instance of QuantDescriptor"
        )
    return copy.deepcopy(descriptor)


def _check_fake(*descriptors: QuantDescriptor) -> None:
    if not all(descriptor.fake_quant for descriptor in descriptors):
        raise ConfigError(
            "init_quantizer: Only fake quantization is supported in layers: "
            "got fake_quant=False; expected True"
        )


class QuantInputMixin:
    """Mixin for modules whose input is quantized, by ``_input_quantizer``."""

    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the default descriptor of later instances to a copy of ``value``.

        Instances of subclasses without an own default use it too.

        Raises:
            ConfigError: not a descriptor.
        """
        cls.default_quant_desc_input = _checked(value)

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Create the quantizer.

        Raises:
            ConfigError: a descriptor without ``fake_quant``.
        """
        _check_fake(quant_desc_input)
        self._fake_quant = True
        self._input_quantizer = TensorQuantizer(quant_desc_input)

    # Any: the read-only view of a child stands where torchq's own layers have the child itself.
    input_quantizer: Any = property(
        lambda self: self._input_quantizer, doc="The quantizer of the input."
    )


class QuantMixin:
    """Mixin for modules with an ``_input_quantizer`` and a ``_weight_quantizer``."""

    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    default_quant_desc_weight = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer
    _weight_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the default descriptor of later instances to a copy of ``value``.

        Instances of subclasses without an own default use it too.

        Raises:
            ConfigError: not a descriptor.
        """
        cls.default_quant_desc_input = _checked(value)

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Do what :meth:`set_default_quant_desc_input` does, for the weight."""
        cls.default_quant_desc_weight = _checked(value)

    def init_quantizer(
        self,
        quant_desc_input: QuantDescriptor,
        quant_desc_weight: QuantDescriptor,
        num_layers: int | None = None,
    ) -> None:
        """Create the quantizers.

        With ``num_layers`` these are the lists ``_input_quantizers`` and ``_weight_quantizers``
        of that length.

        Raises:
            ConfigError: a descriptor without ``fake_quant``.
        """
        _check_fake(quant_desc_input, quant_desc_weight)
        self._fake_quant = True
        if num_layers is None:
            self._input_quantizer = TensorQuantizer(quant_desc_input)
            self._weight_quantizer = TensorQuantizer(quant_desc_weight)
        else:
            self._input_quantizers = QuantizerList(
                TensorQuantizer(quant_desc_input) for _ in range(num_layers)
            )
            self._weight_quantizers = QuantizerList(
                TensorQuantizer(quant_desc_weight) for _ in range(num_layers)
            )

    # Any: the read-only view of a child stands where torchq's own layers have the child itself.
    input_quantizer: Any = property(
        lambda self: self._input_quantizer, doc="The quantizer of the input."
    )
    weight_quantizer: Any = property(
        lambda self: self._weight_quantizer, doc="The quantizer of the weight."
    )


def pop_quant_desc_in_kwargs(quant_cls: Any, input_only: bool = False, **kwargs: Any) -> Any:
    """Return the descriptors in ``kwargs``, by default those of ``quant_cls``.

    Args:
        quant_cls: the class whose defaults are used.
        input_only: True returns the descriptor of the input alone, False ``(input, weight)``.
        **kwargs: ``quant_desc_input`` and ``quant_desc_weight``.

    Raises:
        LegacyTypeError: other keywords.
    """
    known = ["quant_desc_input"] + ["quant_desc_weight"] * (not input_only)
    if unused := sorted(set(kwargs) - set(known)):
        raise LegacyTypeError(f"Unused keys: got {unused}; expected {' or '.join(known)}")
    input_descriptor = kwargs.get("quant_desc_input", quant_cls.default_quant_desc_input)
    if input_only:
        return input_descriptor
    # Scripts ask for both before they look at the kind of their module.
    return input_descriptor, kwargs.get(
        "quant_desc_weight", getattr(quant_cls, "default_quant_desc_weight", None)
    )
