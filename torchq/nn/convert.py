"""Conversion of a float module into its quantized twin in place, and back.

The module object stays. Only its class changes, and quantizers are added as children, as torch's
own ``parametrize`` and ``fully_shard`` do. Parameters, hooks, attributes, dtype, device, mode and
every reference to the module therefore stay valid, also references that a model keeps in a plain
list outside the module tree. :func:`change_class` is the one place that assigns ``__class__``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar, TypeVar, cast

from torch import Tensor, fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError, QuantizationError
from torchq.nn.integer_kernel import IntegerKernel
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import Registry, qualified_name, undone_on_error

#: Float class -> quantized class; :func:`quantized_as` finds those of subclasses.
QUANTIZED: Registry[type, type[QuantModule]] = Registry("quantized twin of")

#: Why a module cannot quantize its result.
_NO_OUTPUT = (
    "cannot quantize its result; expected a convolution or linear layer without an "
    "output_quantizer"
)
_LEGACY_PREFIXES = ("_input_quantizer.", "_weight_quantizer.")


class QuantModule(nn.Module):
    """Base of quantized modules.

    It goes before the float class: ``class QuantConv2d(QuantModule, nn.Conv2d)``. A subclass
    declares its quantized tensors in :attr:`input_slots` and :attr:`weight_slots`, and overrides
    ``forward`` (or a smaller method such as ``_conv_forward``) to call the quantizer of each slot:
    slot ``"input"`` is the child ``input_quantizer``. A slot without a descriptor holds an
    :class:`torch.nn.Identity`.

    Args:
        *args: Positional arguments of the float class.
        **kwargs: Its keyword arguments.
        input_descriptor: How to quantize the inputs. Default: INT8, one range per tensor.
        weight_descriptor: How to quantize the weights. Default: INT8, one range per output channel.

    Example:
        A module with two quantized inputs needs a declaration and a forward, nothing else:

        >>> class Distance(torch.nn.Module):
        ...     def forward(self, a, b):
        ...         return a - b
        >>> @torchq.nn.register(Distance)
        ... class QuantDistance(torchq.nn.QuantModule, Distance):
        ...     input_slots, weight_slots = ("a", "b"), ()
        ...     def forward(self, a, b):
        ...         return super().forward(self.a_quantizer(a), self.b_quantizer(b))
        >>> [name for name, _ in QuantDistance().named_children()]
        ['a_quantizer', 'b_quantizer']
        >>> torchq.nn.QUANTIZED.remove(Distance)
    """

    #: The float class; set by :func:`register`.
    float_class: ClassVar[type[nn.Module]]
    #: Names of the quantized inputs and intermediate values; the ``input`` of a rule is theirs.
    input_slots: ClassVar[tuple[str, ...]] = ("input",)
    #: Names of the quantized weights; the ``weight`` of a rule is theirs.
    weight_slots: ClassVar[tuple[str, ...]] = ("weight",)
    #: Slots that are off unless a target asks -> the kind of operator that such targets name.
    optional_slots: ClassVar[Mapping[str, str]] = types.MappingProxyType({})
    #: Slots of what is multiplied with each other, rather than with a weight.
    factor_slots: ClassVar[tuple[str, ...]] = ()
    #: The axis of the weight that holds its output channels.
    channel_axis: ClassVar[int] = 0
    #: "int32" where the forward rounds the bias as integer kernels do; "" leaves it float.
    bias_format: str = ""
    #: The path in the model of the quantizer that such a kernel rounds the result for.
    rounded_by: str = ""
    #: "input" and "result" where a kernel with a float bias stores these codes from 0.
    from_zero: tuple[str, ...] = ()
    #: Bias format and path of a layer whose BatchNorm is not folded yet: they hold from then on.
    after_fold: tuple[str, str] = ("", "")
    #: The kernel whose results the forward computes; None where it only simulates them.
    integer_kernel: IntegerKernel | None = None
    #: True if the kernels of the target take one scale for the whole weight and no more.
    one_weight_scale: bool = False
    #: True if the forward can quantize the result: see :meth:`quantize_output_`.
    may_quantize_output: ClassVar[bool] = False
    #: True if only a descendant is quantized: the module calls it instead of a fused kernel.
    is_container: ClassVar[bool] = False
    #: True for a module that needs no quantizer: rules quantize it by its path or type alone.
    is_marker: ClassVar[bool] = False

    input_quantizer: nn.Module
    weight_quantizer: nn.Module

    def __init__(
        self,
        *args: Any,
        input_descriptor: QuantDescriptor | None = None,
        weight_descriptor: QuantDescriptor | None = None,
        **kwargs: object,
    ):
        super().__init__(*args, **kwargs)
        input = input_descriptor or QuantDescriptor()
        weight = weight_descriptor or QuantDescriptor(axis=self.channel_axis)
        self.attach_quantizers(**self.slot_descriptors(input, weight))

    @classmethod
    def slots(cls) -> tuple[str, ...]:
        """Return the names of all slots: those of the inputs, then those of the weights."""
        return (*cls.input_slots, *cls.weight_slots)

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the descriptor of every slot, given those of a rule.

        A class overrides this method where a slot needs a descriptor of its own, such as an
        unsigned one for a softmax. The first slot of a kind keeps the rule's descriptor.
        """
        inputs: dict[str, QuantDescriptor | None] = dict.fromkeys(
            cls.input_slots, input
        )
        return inputs | dict.fromkeys(cls.weight_slots, weight)

    @classmethod
    def descriptor_names(cls) -> tuple[str, ...]:
        """Return which descriptors of a rule the class uses: ``"input"``, ``"weight"`` or both."""
        kinds = (("input", cls.input_slots), ("weight", cls.weight_slots))
        return tuple(name for name, slots in kinds if slots)

    def rule_descriptors(self) -> dict[str, QuantDescriptor]:
        """Return the arguments ``input`` and ``weight`` that :func:`convert_` needs to do it again.

        A key is missing where these tensors have no quantizer.
        """
        descriptors = {}
        kinds = {
            "input": self.input_slots,
            "weight": self.weight_slots,
            "output": ("output",),
        }
        for name, slots in kinds.items():
            quantizer = getattr(self, f"{slots[0]}_quantizer", None) if slots else None
            if isinstance(quantizer, TensorQuantizer):
                descriptors[name] = quantizer.given_descriptor
        return descriptors

    @property
    def quantizes_output(self) -> bool:
        """True if the result has a quantizer too; see :meth:`quantize_output_`."""
        return "output_quantizer" in self._modules

    def quantize_output_(self, descriptor: QuantDescriptor) -> None:
        """Quantize the result too, by the child ``output_quantizer``.

        Convolutions and linear layers can.

        Args:
            descriptor: How to quantize. Where it is unsigned, the result passes a ReLU first.
        """
        if not self.may_quantize_output or self.quantizes_output:
            raise QuantizationError(f"{qualified_name(type(self))}: {_NO_OUTPUT}")
        device = next(t.device for t in (*self.parameters(), *self.buffers()))
        quantizer = TensorQuantizer(descriptor, device=device).train(self.training)
        self.add_module("output_quantizer", quantizer)

    @staticmethod
    def quantized_result(result: Tensor, quantizer: Any) -> Tensor:
        """Return the quantized result; a range [0, amax] stands for the ReLU that reads it.

        Without a quantizer the result is returned as it is.
        """
        if quantizer is None:
            return result
        d = quantizer.descriptor
        if d.unsigned is True and d.symmetric:
            # A copy keeps the memory order of an image of one pixel, which kernels behind are
            # chosen by, as the ReLU in place does that this stands for. relu() loses it.
            result = result.relu() if quantizer.quantizing else result.clone().relu_()
        quantized: Tensor = quantizer(result)
        return quantized

    def on_convert(self) -> None:
        """Adjust the module once its quantizers are there; does nothing unless overridden."""

    def on_revert(self) -> None:
        """Undo :meth:`on_convert`; called before the quantizers are removed."""

    def attach_quantizers(self, **descriptors: QuantDescriptor | None) -> None:
        """Add the quantizers; called on construction and by :func:`convert_`."""
        device = next((t.device for t in (*self.parameters(), *self.buffers())), None)
        for slot, descriptor in descriptors.items():
            quantizer: nn.Module = nn.Identity()
            if descriptor is not None:
                mode = "off" if slot in self.optional_slots else "quantize"
                quantizer = TensorQuantizer(descriptor, mode=mode, device=device)
            self.add_module(f"{slot}_quantizer", quantizer.train(self.training))
        self.on_convert()
        self.expect_ranges()

    def detach_quantizers(self) -> None:
        """Remove the quantizers; called by :func:`revert_`."""
        self.on_revert()
        for slot in (*self.slots(), *(("output",) if self.quantizes_output else ())):
            delattr(self, f"{slot}_quantizer")

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield each weight quantizer with the tensor that it quantizes.

        These quantizers are calibrated without data. By default slot ``"weight"`` quantizes the
        attribute ``weight``.
        """
        for slot in self.weight_slots:
            quantizer = getattr(self, f"{slot}_quantizer")
            if isinstance(quantizer, TensorQuantizer):
                yield quantizer, cast(Tensor, getattr(self, slot))

    def expect_ranges(self) -> None:
        """Give unknown ranges of weights their dimensions; see TensorQuantizer.expect_range."""
        for quantizer, weight in self.quantized_weights():
            quantizer.expect_range(weight.shape)

    def _load_from_state_dict(
        self, state_dict: dict[str, object], prefix: str, *args: Any
    ) -> None:
        # Checkpoints of pytorch-quantization name the quantizers with a leading underscore.
        legacy = tuple(prefix + p for p in _LEGACY_PREFIXES)
        for key in [k for k in state_dict if k.startswith(legacy)]:
            state_dict[prefix + key[len(prefix) + 1 :]] = state_dict.pop(key)
        # A layer that was float has no range in a checkpoint, one that was quantized has all.
        ranges = {
            f"{prefix}{name}.amax": child
            for name, child in self._modules.items()
            if isinstance(child, TensorQuantizer)
        }
        with_ranges = [child for key, child in ranges.items() if key in state_dict]
        if with_ranges:
            args[2].extend(
                key for key, child in ranges.items() if child not in with_ranges
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


Q = TypeVar("Q", bound=type[QuantModule])


def register(float_class: type[nn.Module]) -> Callable[[Q], Q]:
    """Return a class decorator that makes a class the quantized twin of ``float_class``.

    Args:
        float_class: The class whose modules :func:`convert_` and :func:`torchq.quantize_` will
            convert. The decorated class derives from :class:`QuantModule` and ``float_class``, and
            stands at module level so that it can be pickled.

    Returns:
        The decorator, which returns the class unchanged.

    Raises:
        ConfigError: ``float_class`` has a twin already, or the decorated class does not derive
            from both.

    Example:
        >>> class Scale(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return 2 * super().forward(x)
        >>> @torchq.nn.register(Scale)
        ... class QuantScale(torchq.nn.QuantModule, Scale):
        ...     def forward(self, x):
        ...         x, weight = self.input_quantizer(x), self.weight_quantizer(self.weight)
        ...         return 2 * torch.nn.functional.linear(x, weight, self.bias)
        >>> module = torchq.nn.convert_(Scale(2, 2), input=torchq.QuantDescriptor())
        >>> type(module).__name__
        'QuantScale'
        >>> torchq.nn.QUANTIZED.remove(Scale)
    """

    def decorator(cls: Q) -> Q:
        if not (issubclass(cls, QuantModule) and issubclass(cls, float_class)):
            raise ConfigError(
                f"register({qualified_name(float_class)}): got {qualified_name(cls)}; "
                "expected a subclass of QuantModule and of it"
            )
        cls.float_class = float_class
        QUANTIZED.add(float_class, cls)
        return cls

    return decorator


def quantized_as(cls: type[nn.Module]) -> type[nn.Module] | None:
    """Return the registered class that modules of class ``cls`` are quantized as, or None.

    That is ``cls`` itself, or the nearest registered base where ``cls`` changes nothing that
    decides the result: it has no ``forward`` and no other computing method of its own, and no
    property in the place of the weight or bias, unless torch made it for a parametrization.

    Example:
        >>> class MyLinear(torch.nn.Linear):
        ...     def reset_parameters(self):
        ...         torch.nn.init.ones_(self.weight)
        >>> quantized_as(MyLinear).__name__
        'Linear'
    """
    cls = unparametrized(cls)
    base = next((c for c in cls.__mro__ if c in QUANTIZED), None)
    if base is None or base is cls:
        return base
    if issubclass(cls, (QuantModule, LazyModuleMixin)):
        return None
    return base if changes_nothing(cls, base) else None


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has, or had before it was quantized."""
    return type(module).float_class if isinstance(module, QuantModule) else type(module)


def float_name(module: nn.Module) -> str:
    """Return the name of the class that a module has, or had before: the one its author wrote."""
    return unparametrized(float_class_of(module)).__name__


def quantized_class(cls: type[nn.Module]) -> type[QuantModule] | None:
    """Return the class that :func:`convert_` gives to modules of class ``cls``, or None.

    For a subclass of a registered class (see :func:`quantized_as`) it is made at run time and
    derives from both the registered twin and ``cls``. A parametrized module stays parametrized:
    see :func:`change_class`.
    """
    cls = unparametrized(cls)
    base = quantized_as(cls)
    if base is None or base is cls:
        return QUANTIZED.get(cls)
    return _derived_twin(cls, QUANTIZED[base])  # type: ignore[arg-type]


class _DerivedTwin(QuantModule):
    """Mixin of the classes that are made for subclasses of registered classes."""

    def __reduce_ex__(self, protocol: object) -> Any:
        # The class has no importable name: copies and pickles look it up by its float class.
        return (
            _blank_twin,
            (type(self).float_class,),
            *cast(Any, super().__reduce_ex__(2))[2:],
        )


@cache
def _derived_twin(cls: type[nn.Module], twin: type[nn.Module]) -> type[QuantModule]:
    doc = f"Quantized :class:`{qualified_name(cls)}`."
    return class_below((_DerivedTwin, twin, cls), f"Quant{cls.__name__}", doc)


def _blank_twin(cls: type[nn.Module]) -> QuantModule:
    twin = quantized_class(cls)
    if twin is None:
        raise QuantizationError(
            f"{qualified_name(cls)}: has no quantized twin; expected the code that was pickled"
        )
    return twin.__new__(twin)


def convert_(
    module: nn.Module,
    *,
    input: QuantDescriptor | None = None,
    weight: QuantDescriptor | None = None,
    output: QuantDescriptor | None = None,
) -> nn.Module:
    """Make ``module`` quantized, in place, and return it.

    Args:
        module: A module whose class is registered, or computes the same as a registered one; see
            :func:`quantized_as`.
        input: How to quantize the inputs; None leaves them alone. Ignored where the class has no
            quantized input.
        weight: How to quantize the weights; None leaves them alone. Ignored where the class has no
            quantized weight.
        output: How to quantize the result of a convolution or linear layer; see
            :meth:`QuantModule.quantize_output_`. None leaves it alone.

    Returns:
        The same object.

    Raises:
        QuantizationError: The class is not registered, an attribute has the name of a quantizer,
            or ``forward`` was replaced on the instance. The module is unchanged then.

    Example:
        >>> module = torchq.nn.convert_(torch.nn.Linear(2, 2), weight=torchq.QuantDescriptor(4))
        >>> module.weight_quantizer.descriptor.num_bits, type(module.input_quantizer).__name__
        (4, 'Identity')
    """
    name = qualified_name(type(module))
    twin = quantized_class(type(module))
    if twin is None:
        raise QuantizationError(
            f"{name}: has no quantized twin; expected one of the registered classes. "
            "See torchq.nn.register"
        )
    if "forward" in vars(module):
        raise QuantizationError(
            f"{name}: forward was replaced on the instance; expected the class's own"
        )
    occupied = [
        f"{slot}_quantizer"
        for slot in twin.slots()
        if hasattr(module, f"{slot}_quantizer")
    ]
    if occupied:
        raise QuantizationError(
            f"{name}: has {occupied[0]} already; expected a float module"
        )
    with unchanged_on_error(module):
        change_class(module, twin)
        module.attach_quantizers(**twin.slot_descriptors(input, weight))  # type: ignore[operator]
        if output is not None:
            module.quantize_output_(output)  # type: ignore[operator]
    return module


def revert_(module: QuantModule) -> nn.Module:
    """Make a quantized module float again, in place, and return it: the inverse of ``convert_``."""
    module.detach_quantizers()
    for name in (
        "bias_format",
        "rounded_by",
        "from_zero",
        "after_fold",
        "one_weight_scale",
        "integer_kernel",
    ):
        vars(module).pop(name, None)
    change_class(module, type(module).float_class)
    return module


def change_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give ``module`` another class of the same layout; ``__class__`` is assigned only here.

    A graph module gets a class of its own below ``cls``, which holds the code of its graph. So does
    a parametrized module, whose class computes the parametrized tensors.
    """
    if is_parametrized_class(type(module)) and not is_parametrized_class(cls):
        cls = parametrized_like(cls, type(module))
    if not isinstance(module, fx.GraphModule) or "<locals>" in cls.__qualname__:
        module.__class__ = cls
        return
    own_class: Any = type(cls.__new__(cls))
    own_class.__name__ = type(module).__name__
    module.__class__ = own_class
    module.recompile()


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give ``model`` its classes, attributes, children and tensors back if the block raises.

    Every exception counts, also KeyboardInterrupt. Numbers that the block wrote into a tensor in
    place are not undone.
    """
    classes = [(module, type(module)) for module in model.modules()]
    try:
        with undone_on_error(model):
            yield
    except BaseException:
        for module, cls in classes:
            if type(module) is not cls:
                change_class(module, cls)
        raise


# --- classes that compute what their base computes ----------------------------------------------
#
# torch.nn.utils.parametrize gives a module a class of its own, whose properties compute the
# parametrized tensors. Such a module is quantized as a module of its former class: the weight is
# quantized after the parametrization, as if the module had been parametrized last.

# What decides the result of a module, beside the methods that its class adds to nn.Module.
_COMPUTING = frozenset(
    [
        "forward",
        "__call__",
        "_call_impl",
        "_wrapped_call_impl",
        "__getattr__",
        "__getattribute__",
    ]
)
# What a subclass may change of its base and still compute the same.
_INITIALISING = frozenset(
    ["extra_repr", "from_pretrained", "reset_parameters", "reset_running_stats"]
    + ["_fill_padding_idx_with_zero", "_reset_parameters"]
)


def changes_nothing(cls: type[nn.Module], base: type[nn.Module]) -> bool:
    """Return True if a subclass has no method that computes, and no property for weight or bias."""
    added = {
        name
        for name in set(dir(base)) - set(dir(nn.Module))
        if not name.startswith("__")
    }
    return all(
        inspect.getattr_static(cls, name, None)
        is inspect.getattr_static(base, name, None)
        for name in (added | _COMPUTING) - _INITIALISING | {"weight", "bias"}
    )


def is_parametrized_class(cls: type[nn.Module]) -> bool:
    """Return True if torch made ``cls`` for one module with parametrizations."""
    return any(
        isinstance(value, property) and value.fget.__module__ == parametrize.__name__
        for value in vars(cls).values()
    )


def unparametrized(cls: type[nn.Module]) -> type[Any]:
    """Return the class that a module had before its parametrizations; ``cls`` if it has none."""
    return cls.__bases__[0] if is_parametrized_class(cls) else cls


def parametrized_like(cls: type[nn.Module], example: type[nn.Module]) -> type[Any]:
    """Return a class below ``cls`` with the parametrized tensors of ``example``, as torch's."""
    body = {
        key: value
        for key, value in vars(example).items()
        if key not in ("__dict__", "__weakref__")
    }
    name = f"Parametrized{cls.__name__}"
    return types.new_class(name, (cls,), {}, lambda space: space.update(body))


class Unnoticed(nn.Module):
    """The first base of classes that conversion makes: classes of the user do not hear of them.

    A class may keep a list of those below it, and ask their authors for arguments.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Do nothing, and call none of the other bases."""


def class_below(
    bases: tuple[type[Any], ...], name: str, doc: str, **body: object
) -> type[Any]:
    """Return a class for modules whose ``float_class``, and module, is the last of ``bases``."""
    cls = bases[-1]
    body |= {"float_class": cls, "__doc__": doc, "__module__": cls.__module__}
    return types.new_class(
        name, (Unnoticed, *bases), {}, lambda space: space.update(body)
    )
