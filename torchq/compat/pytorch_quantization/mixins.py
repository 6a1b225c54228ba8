"""Mixins, from which scripts derive too, that give quantizers; and the base of the layers."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchq import nn as core
from torchq.compat.errors import LegacyTypeError
from torchq.compat.pytorch_quantization.tensor_quant import (
    QUANT_DESC_8BIT_PER_TENSOR,
    QuantDescriptor,
)
from torchq.compat.pytorch_quantization.tensor_quantizer import TensorQuantizer
from torchq.errors import ConfigError
from torchq.nn import QuantModule
from torchq.nn.optional_buffers import CORRECTION


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


def _checked(descriptor: object) -> QuantDescriptor:
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


class _InputMixin:
    """Base of both mixins, which scripts tell apart by ``isinstance``."""

    default_quant_desc_input = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizer: TensorQuantizer

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the default descriptor of later instances to a copy of ``value``.

        Instances of subclasses without an own default use it too.
        """
        cls.default_quant_desc_input = _checked(value)

    # Any: the read-only view of a child stands where torchq's own layers have the child itself.
    input_quantizer: Any = property(
        lambda self: self._input_quantizer, doc="The quantizer of the input."
    )


class QuantInputMixin(_InputMixin):
    """Mixin for modules whose input is quantized, by ``_input_quantizer``."""

    def init_quantizer(self, quant_desc_input: QuantDescriptor) -> None:
        """Create the quantizer."""
        _check_fake(quant_desc_input)
        self._fake_quant = True
        self._input_quantizer = TensorQuantizer(quant_desc_input)


class QuantMixin(_InputMixin):
    """Mixin for modules with an ``_input_quantizer`` and a ``_weight_quantizer``."""

    default_quant_desc_weight = QUANT_DESC_8BIT_PER_TENSOR
    _input_quantizers: Any
    _weight_quantizers: Any
    _weight_quantizer: TensorQuantizer

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
        """
        _check_fake(quant_desc_input, quant_desc_weight)
        self._fake_quant = True
        for slot, descriptor in (
            ("input", quant_desc_input),
            ("weight", quant_desc_weight),
        ):
            if num_layers is None:
                setattr(self, f"_{slot}_quantizer", TensorQuantizer(descriptor))
            else:
                found = QuantizerList(
                    TensorQuantizer(descriptor) for _ in range(num_layers)
                )
                setattr(self, f"_{slot}_quantizers", found)

    weight_quantizer: Any = property(
        lambda self: self._weight_quantizer, doc="The quantizer of the weight."
    )


def pop_quant_desc_in_kwargs(
    quant_cls: Any, input_only: bool = False, **kwargs: object
) -> Any:
    """Return the descriptors in ``kwargs``, by default those of ``quant_cls``."""
    descriptor_names = ["quant_desc_input"] + ["quant_desc_weight"] * (not input_only)
    if unused := sorted(set(kwargs) - set(descriptor_names)):
        raise LegacyTypeError(
            f"Unused keys: got {unused}; expected {' or '.join(descriptor_names)}"
        )
    input_descriptor = kwargs.get(
        "quant_desc_input", quant_cls.default_quant_desc_input
    )
    if input_only:
        return input_descriptor
    # Scripts ask for both before they look at the kind of their module.
    return input_descriptor, kwargs.get(
        "quant_desc_weight", getattr(quant_cls, "default_quant_desc_weight", None)
    )


class LegacyLayer(QuantModule):
    """Base of legacy layers, between a mixin and a class of :mod:`torchq.nn` in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        parameters = inspect.signature(self.float_class.__init__).parameters
        float_arguments = {
            key: kwargs.pop(key) for key in list(kwargs) if key in parameters
        }
        input_only = not self.weight_slots
        descriptors = pop_quant_desc_in_kwargs(
            type(self), input_only=input_only, **kwargs
        )
        super(QuantModule, self).__init__(*args, **float_arguments)
        arguments = (descriptors,) if input_only else descriptors
        self.init_quantizer(*arguments)  # type: ignore[operator]

    def _quant(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantized input and weight; scripts with own convolutions call it."""
        return self.input_quantizer(input), self.weight_quantizer(self.weight)

    def detach_quantizers(self) -> None:
        """Remove the quantizers, which have a leading underscore here, and a correction."""
        for slot in self.slots():
            delattr(self, f"_{slot}_quantizer")
        for buffer in CORRECTION:
            self._buffers.pop(buffer.name, None)
        self.__dict__.pop("_fake_quant", None)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        for slot in self.slots():  # the names in torchq's own modules
            new = f"{prefix}{slot}_quantizer."
            for key in [key for key in state_dict if key.startswith(new)]:
                state_dict[f"{prefix}_{slot}_quantizer.{key[len(new) :]}"] = (
                    state_dict.pop(key)
                )
        keys = [prefix + buffer.name for buffer in CORRECTION]
        stored = [key for key in keys if key in state_dict]
        sizes = [state_dict.pop(key).numel() for key in stored]
        if any(sizes):
            args[4].append(
                f"{prefix}output_shift: corrects a result, which layers of pytorch_quantization "
                "cannot; expected none. Calibrate with correct=False before saving"
            )
        super(QuantModule, self)._load_from_state_dict(state_dict, prefix, *args)


def constructor(
    signature: inspect.Signature, method: Callable[..., None]
) -> Callable[..., None]:
    """Return ``method`` as a constructor that shows the arguments of a float class by name.

    Those of the original do, with ``**kwargs`` for the descriptors, and without ``device``,
    ``dtype`` and what only torch's base of recurrent layers has. Libraries, such as
    super-gradients, read the names with ``inspect.signature`` and look for attributes of these
    names in a float layer.
    """

    @functools.wraps(method)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)

    hidden = ("device", "dtype", "mode", "proj_size", "args", "kwargs")
    shown = [p for name, p in signature.parameters.items() if name not in hidden]
    shown.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
    __init__.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return __init__


def make_layer(
    name: str, module: str, mixin: type, **attributes: object
) -> type[LegacyLayer]:
    """Return the quantized twin of ``torch.nn``'s class ``name``, as a class of ``module``."""
    attributes |= {
        "__module__": module,
        "__doc__": f"Quantized :class:`torch.nn.{name}`.",
        "__init__": constructor(
            inspect.signature(getattr(nn, name).__init__), LegacyLayer.__init__
        ),
    }
    return type(
        f"Quant{name}", (mixin, LegacyLayer, getattr(core, f"Quant{name}")), attributes
    )
