"""Modules whose own forward runs while the operands of its calls pass through quantizers."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.graph import Operator, rewrite_forward
from torchq.nn.calls.functions import CallSite, operand, product_of, with_operands
from torchq.nn.convert import QuantModule, change_class, register
from torchq.nn.modules.operators import ScaledDotProductAttention
from torchq.nn.operator_modules import OperatorOwner
from torchq.nn.operator_routes import MARK, Route, base_name
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.utils import qualified_name


class Call(nn.Module):
    """Place of one function call in the forward of its parent; it is never called itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the parent makes the call.

        Raises:
            QuantizationError: Always.
        """
        raise QuantizationError(
            "torchq.nn.Call: was called; expected its parent to make the call. "
            "It only holds the quantizers of a function call"
        )


@register(Call)
class QuantCall(QuantModule, Call):
    """:class:`Call` with the quantizers of the input and of the weight.

    The weight belongs to the parent, which reports it in ``quantized_weights``.
    """

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield nothing: see the parent."""
        return iter(())


class ComputedCall(nn.Module):
    """Base of holders that compute a call themselves, in place of the function."""

    def __init__(self, simulated: QuantModule) -> None:
        super().__init__()
        self.simulated = simulated

    def arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return what ``forward`` takes for a call; None for a call that it does not compute."""
        raise NotImplementedError


class RoutedModule(OperatorOwner):
    """Base of the classes that :func:`route_calls_` makes, a few for each float class.

    The forward of the float class runs under a torch function mode. The mode passes the operands
    of the calls in :attr:`calls` through quantizers, and everything else on unchanged. Where
    children stand for operators (``+``, ``@`` of two inputs), its source is rewritten.

    Attributes:
        calls: The calls whose operands are quantized.
        replacements: Name of an operator (of a site in the source) -> name of the child.
        replaced_sites: The names in ``replacements`` without numbers of visits.
        recorder: Always None: nothing notes operators here.
    """

    #: The forward of the float class.
    float_forward: ClassVar[Callable[..., Any]]
    #: The source of the forward is rewritten.
    is_rewritten: ClassVar[bool]

    calls: tuple[CallSite, ...]
    replaced_sites: frozenset[str] = frozenset()
    recorder: None = None

    def holders(self) -> Iterator[tuple[CallSite, nn.Module]]:
        """Yield each call with the module that holds its quantizers."""
        for site in self.calls:
            yield site, self.get_submodule(site.holder)

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield the weight quantizers of calls with a parameter, each with that parameter.

        A computed weight is calibrated as an input is, by observing it. A child that computes with
        its weight itself reports it.
        """
        for site, holder in self.holders():
            if site.weight and (holder is self or isinstance(holder, Call)):
                quantizer = getattr(holder, "weight_quantizer", None)
                if isinstance(quantizer, TensorQuantizer):
                    yield quantizer, _attribute(self, site.weight)

    def on_revert(self) -> None:
        """Remove the children that only hold quantizers, and those that stand for operators."""
        for site, holder in list(self.holders()):
            if isinstance(holder, (Call, ScaledDotProductAttention)):
                parent, _, name = site.holder.rpartition(".")
                delattr(self.get_submodule(parent), name)
        for child in set(self.replacements.values()):
            delattr(self, child)
        for name in ("calls", "replacements", "replaced_sites"):
            vars(self).pop(name, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made at run time: copies and pickles look it up by its float class.
        reduced: Any = super().__reduce_ex__(2)
        cls = type(self)
        return _blank, (cls.float_class, cls.is_container, cls.is_rewritten), *reduced[2:]


class _Router(TorchFunctionMode):
    """Sends the operands of one forward's calls through their quantizers."""

    def __init__(self, module: RoutedModule) -> None:
        super().__init__()
        self.module = module
        self.found: set[int] = set()  # Positions in calls.
        self.others: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        function = product_of(func, args)
        if function is None:
            return func(*args, **kwargs)
        site = self._site(function, args, kwargs)
        if site is None:
            return func(*args, **kwargs)
        holder: Any = self.module.get_submodule(site.holder) if site.holder else self.module
        if site.kind == "attention":
            return holder(*args, **kwargs)
        if isinstance(holder, ComputedCall):
            given = holder.arguments(func, args, kwargs)
            if given is not None:
                return holder(*given)
            holder = holder.simulated
        if not isinstance(holder, QuantModule):  # It was left float, or is float again.
            return func(*args, **kwargs)
        input, weight = function.left, function.right
        if site.weight_is_left:
            input, weight = weight, input
        changed = {
            input: holder.input_quantizer(operand(args, kwargs, input)),
            weight: holder.weight_quantizer(operand(args, kwargs, weight)),
        }
        args, kwargs = with_operands(args, kwargs, changed)
        return func(*args, **kwargs)

    def _site(
        self, function: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CallSite | None:
        """Return the site of a call: by its parameter, else by its number among the others."""
        kind = function.word
        for position, site in enumerate(self.module.calls):
            if site.kind == kind and site.weight:
                place = function.left if site.weight_is_left else function.right
                if operand(args, kwargs, place) is _attribute(self.module, site.weight):
                    self.found.add(position)
                    return site
        number = self.others.get(kind, 0)
        self.others[kind] = number + 1
        for position, site in enumerate(self.module.calls):
            if site.kind == kind and not site.weight and site.number == number:
                self.found.add(position)
                return site
        return None

    def check(self, is_symbolic: bool) -> None:
        """Raise QuantizationError if the forward made other calls than the planned ones."""
        if is_symbolic and len(self.found) < len(self.module.calls):
            self._refuse("made calls that no tracer of torch.fx sees; expected calls of functions")
        for site in self.module.calls:
            made = self.others.get(site.kind, 0)
            if not site.weight and made != site.total:
                self._refuse(f"made {made} calls of kind {site.kind}; expected {site.total}")
        if not self.found and self.others and not self.module.is_container:
            self._refuse("computed the weight of its call; expected the parameter itself")

    def _refuse(self, text: str) -> None:
        name = qualified_name(type(self.module).float_class)
        raise QuantizationError(
            f"{name}: its forward {text}, as when it was quantized. Exclude it, or register a "
            f"twin with torchq.nn.register({name})"
        )


def _attribute(module: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), module)


@cache
def _twin(cls: type[Any], is_container: bool, is_rewritten: bool) -> type[RoutedModule]:
    """Return the class for modules of a float class: one for each, so types of copies are equal."""
    float_forward = rewrite_forward(cls, Route) if is_rewritten else cls.forward
    if float_forward is None:
        raise QuantizationError(
            f"{qualified_name(cls)}: the source of its forward cannot be read; expected the code "
            "that was quantized"
        )

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        router = _Router(self)
        # Not "with _Router(self) as router": Dynamo would not give the mode there.
        with router:
            result = float_forward(self, *args, **kwargs)
        router.check(any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())))
        return result

    # Exporters ask for the names of arguments.
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    slots = ((), ()) if is_container else (("input",), ("weight",))
    body = {
        "float_class": cls,
        "float_forward": cls.forward,
        "forward": forward,
        "input_slots": slots[0],
        "weight_slots": slots[1],
        "is_container": is_container,
        "is_rewritten": is_rewritten,
        "__doc__": f":class:`{qualified_name(cls)}` with quantized calls.",
        "__module__": cls.__module__,
    }
    name = f"Quant{cls.__name__}"
    return types.new_class(name, (RoutedModule, cls), {}, lambda space: space.update(body))


def _blank(cls: type[nn.Module], is_container: bool, is_rewritten: bool) -> RoutedModule:
    twin: type[RoutedModule] = _twin(cls, is_container, is_rewritten)  # type: ignore[arg-type]
    return twin.__new__(twin)


def route_calls_(
    module: nn.Module,
    calls: Sequence[CallSite],
    *,
    input: QuantDescriptor | None = None,
    weight: QuantDescriptor | None = None,
    operators: Mapping[str, str] | None = None,
) -> nn.Module:
    """Quantize calls in the forward of ``module``, in place, and return it.

    :func:`torchq.nn.revert_` is the inverse. A holder that does not exist is added as a float
    :class:`Call` (:class:`ScaledDotProductAttention` for attention), to be converted next.

    Example:
        >>> class Product(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.kernel = torch.nn.Parameter(torch.eye(2))
        ...     def forward(self, x):
        ...         return x @ self.kernel
        >>> site = CallSite("matmul", weight="kernel")
        >>> product = route_calls_(Product(), [site], input=torchq.QuantDescriptor(2))
        >>> product.input_quantizer.set_amax(1.0)
        >>> product(torch.tensor([[0.4, 0.6]]))
        tensor([[0., 1.]], grad_fn=<MmBackward0>)
    """
    own = [site for site in calls if not site.holder]
    _check_routable(module, calls, own, operators or ())
    twin = _twin(type(module), not own, bool(operators))  # type: ignore[arg-type]
    added = _add_holders(module, calls)
    change_class(module, twin)
    routed: Any = module
    routed.calls = tuple(calls)
    if operators:
        routed.replacements = dict(operators)
        routed.replaced_sites = frozenset(map(base_name, operators))
    try:
        routed.attach_quantizers(**({"input": input, "weight": weight} if own else {}))
    except Exception:
        for path in added:
            delattr(module, path)
        for name in ("calls", "replacements", "replaced_sites"):
            vars(module).pop(name, None)
        change_class(module, type(module).float_class)  # type: ignore[attr-defined]
        raise
    return module


def _check_routable(
    module: nn.Module,
    calls: Sequence[CallSite],
    own: Sequence[CallSite],
    operators: Iterable[str],
) -> None:
    """Raise QuantizationError if :func:`route_calls_` cannot convert the module."""
    name = qualified_name(type(module))
    if "forward" in vars(module):
        raise QuantizationError(
            f"{name}: forward was replaced on the instance; expected the class's own"
        )
    if isinstance(module, fx.GraphModule):
        raise QuantizationError(
            f"{name}: is a graph of torch.fx, whose copies would lose the quantizers; expected a "
            "module with a forward of its own. Quantize the model before it is traced"
        )
    if not calls or (own and len(calls) > 1):
        raise QuantizationError(
            f"{name}: got {len(own)} calls without a holder among {len(calls)}; expected one call "
            "alone, or a holder for each"
        )
    if isinstance(module, QuantModule) or (own and hasattr(module, "input_quantizer")):
        raise QuantizationError(f"{name}: has quantizers already; expected a float module")
    for site in calls:
        _check_paths(module, site)
    if not all(site.startswith(MARK) for site in operators):
        raise QuantizationError(
            f"{name}: got the operators {', '.join(operators)}; expected places in its source"
        )


def _check_paths(module: nn.Module, site: CallSite) -> None:
    name = qualified_name(type(module))
    parent, _, leaf = site.weight.rpartition(".")
    try:
        if site.weight and leaf not in dict(module.get_submodule(parent).named_parameters()):
            raise AttributeError(f"it has no parameter {site.weight}")
        if "." in site.holder or hasattr(module, site.holder):
            module.get_submodule(site.holder)
    except AttributeError as error:
        raise QuantizationError(
            f"{name}: got a call with the weight {site.weight!r} and the holder {site.holder!r}; "
            f"expected names of the module ({error})"
        ) from None


def _add_holders(module: nn.Module, calls: Sequence[CallSite]) -> list[str]:
    """Add the float children that will hold quantizers; return their names."""
    added = []
    for site in calls:
        if "." in site.holder or not site.holder or hasattr(module, site.holder):
            continue
        holder = ScaledDotProductAttention() if site.kind == "attention" else Call()
        module.add_module(site.holder, holder.train(module.training))
        added.append(site.holder)
    return added
