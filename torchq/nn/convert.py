"""Turning a float module into its quantized twin in place, and back.

The module object stays; only its class changes, and quantizers are added as children, as torch's own ``parametrize`` and
``fully_shard`` do. So parameters, hooks, attributes, dtype, device, mode and every reference to the module stay right, also
those that a model keeps in a plain list outside the module tree. :func:`change_class` is the one place that assigns
``__class__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import Registry, qualified_name

__all__ = [
    "QuantModule",
    "QUANTIZED",
    "register",
    "convert_",
    "revert_",
    "change_class",
    "is_weight_quantizer",
]

#: Float class -> quantized class; exact types only.
QUANTIZED: Registry[type, type[QuantModule]] = Registry("quantized twin of")

_LEGACY_PREFIXES = ("_input_quantizer.", "_weight_quantizer.")


class QuantModule(nn.Module):
    """Base of quantized modules; goes before the float class: ``class QuantConv2d(QuantModule, nn.Conv2d)``.

    A subclass overrides ``forward`` (or a smaller seam such as ``_conv_forward``) and calls :attr:`input_quantizer` and
    :attr:`weight_quantizer` there. Where a descriptor is None the quantizer is an :class:`torch.nn.Identity`.

    Args:
        *args, **kwargs: those of the float class.
        input_descriptor, weight_descriptor: how to quantize; default INT8, per tensor, and for the weight per channel.
    """

    #: The float class; set by :func:`register`.
    float_class: ClassVar[type[nn.Module]]
    #: Which quantizers the class has.
    quantizers: ClassVar[tuple[str, ...]] = ("input", "weight")
    #: The axis of the weight that its output channels are on.
    channel_axis: ClassVar[int] = 0
    #: Converted only because a descendant is: it must call its children instead of a fused kernel.
    is_container: ClassVar[bool] = False
    #: Computes nothing: reported only where a rule names it.
    is_marker: ClassVar[bool] = False

    input_quantizer: nn.Module
    weight_quantizer: nn.Module

    def __init__(
        self,
        *args: Any,
        input_descriptor: QuantDescriptor | None = None,
        weight_descriptor: QuantDescriptor | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        default = {"input": QuantDescriptor(), "weight": QuantDescriptor(axis=self.channel_axis)}
        given = {"input": input_descriptor, "weight": weight_descriptor}
        self._attach(**{slot: given[slot] or default[slot] for slot in self.quantizers})

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        """Add the quantizers; called on construction and by :func:`convert_`."""
        device = next((t.device for t in (*self.parameters(), *self.buffers())), None)
        for slot, descriptor in descriptors.items():
            quantizer = (
                nn.Identity() if descriptor is None else TensorQuantizer(descriptor, device=device)
            )
            self.add_module(f"{slot}_quantizer", quantizer.train(self.training))

    def _detach(self) -> None:
        """Take the quantizers out again; called by :func:`revert_`."""
        for slot in self.quantizers:
            delattr(self, f"{slot}_quantizer")

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Each weight quantizer with the tensor that it quantizes; they are calibrated without data."""
        if "weight" in self.quantizers and isinstance(self.weight_quantizer, TensorQuantizer):
            yield self.weight_quantizer, cast(Tensor, self.weight)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Checkpoints of pytorch-quantization name the quantizers with a leading underscore.
        for key in [
            k for k in state_dict if k.startswith(tuple(prefix + p for p in _LEGACY_PREFIXES))
        ]:
            state_dict[prefix + key[len(prefix) + 1 :]] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)


Q = TypeVar("Q", bound=type[QuantModule])


def register(float_class: type[nn.Module]) -> Callable[[Q], Q]:
    """Class decorator: this is the quantized twin of ``float_class``.

    The decorated class derives from :class:`QuantModule` and ``float_class``, at module level so that it can be pickled.

    Raises:
        ConfigError: ``float_class`` has a twin already, or the decorated class does not derive from both.

    Example:
        >>> class Scale(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> @torchq.register(Scale)
        ... class QuantScale(torchq.nn.QuantModule, Scale):
        ...     def forward(self, x):
        ...         return 2 * torch.nn.functional.linear(self.input_quantizer(x), self.weight_quantizer(self.weight), self.bias)
        >>> type(torchq.nn.convert_(Scale(2, 2), input=torchq.QuantDescriptor())).__name__
        'QuantScale'
        >>> torchq.nn.QUANTIZED.remove(Scale)
    """

    def decorator(cls: Q) -> Q:
        if not (issubclass(cls, QuantModule) and issubclass(cls, float_class)):
            raise ConfigError(
                f"register({qualified_name(float_class)}): got {qualified_name(cls)}; expected a subclass of QuantModule and of it"
            )
        cls.float_class = float_class
        QUANTIZED.add(float_class, cls)
        return cls

    return decorator


def convert_(
    module: nn.Module,
    *,
    input: QuantDescriptor | None = None,
    weight: QuantDescriptor | None = None,
) -> nn.Module:
    """Make ``module`` quantized, in place, and return it.

    Args:
        module: of a registered class, exactly.
        input, weight: how to quantize; None leaves that tensor alone. Ignored where the class has no such quantizer.

    Raises:
        QuantizationError: the class is not registered, an attribute is in the way, or ``forward`` was replaced on the instance.
    """
    twin = QUANTIZED.get(type(module))
    if twin is None:
        raise QuantizationError(
            f"{qualified_name(type(module))}: has no quantized twin; expected one of the registered classes. See torchq.register"
        )
    if "forward" in vars(module):
        raise QuantizationError(
            f"{qualified_name(type(module))}: forward was replaced on the instance; expected the class's own"
        )
    given = {"input": input, "weight": weight}
    if taken := [
        f"{slot}_quantizer" for slot in twin.quantizers if hasattr(module, f"{slot}_quantizer")
    ]:
        raise QuantizationError(
            f"{qualified_name(type(module))}: has {taken[0]} already; expected a float module"
        )
    change_class(module, twin)
    try:
        module._attach(**{slot: given[slot] for slot in twin.quantizers})  # type: ignore[operator]
    except Exception:
        for slot in twin.quantizers:
            if hasattr(module, f"{slot}_quantizer"):
                delattr(module, f"{slot}_quantizer")
        change_class(module, twin.float_class)
        raise
    return module


def revert_(module: QuantModule) -> nn.Module:
    """Make a quantized module float again, in place, and return it: the inverse of :func:`convert_`."""
    module._detach()
    change_class(module, type(module).float_class)
    return module


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` another class of the same layout: the only assignment to ``__class__`` in torchq. For ``nn/`` alone."""
    module.__class__ = cls


def is_weight_quantizer(module: QuantModule, quantizer: nn.Module) -> bool:
    """Whether ``quantizer`` quantizes a weight of ``module``."""
    return any(q is quantizer for q, _ in module.quantized_weights())
