"""Conversion of modules whose own forward runs while its calls pass through quantizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.nn.calls.functions import CallSite
from torchq.nn.calls.modules import RoutedModule, route_
from torchq.nn.convert import QuantModule
from torchq.nn.modules.operators import Call, ScaledDotProductAttention
from torchq.utils import qualified_name

__all__ = ["RoutedModule", "route_calls_"]


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
    own = [call for call in calls if not (call.holder or call.is_unseen)]
    _check_routable(module, calls, own)
    added = _add_holders(module, calls)
    descriptors = {"input": input, "weight": weight} if own else {}
    try:
        route_(module, calls, operators or {}, descriptors=descriptors)
    except BaseException:
        for path in added:
            delattr(module, path)
        raise
    return module


def _check_routable(
    module: nn.Module,
    calls: Sequence[CallSite],
    own: Sequence[CallSite],
) -> None:
    """Raise QuantizationError if :func:`route_calls_` cannot convert the module."""
    name = qualified_name(type(module))
    if isinstance(module, fx.GraphModule):
        raise QuantizationError(
            f"{name}: is a graph of torch.fx, whose copies would lose the quantizers; expected a "
            "module with a forward of its own. Quantize the model before it is traced"
        )
    planned = [call for call in calls if not call.is_unseen]
    if not planned or (own and len(planned) > 1):
        raise QuantizationError(
            f"{name}: got {len(own)} calls without a holder among {len(planned)}; expected one "
            "call alone, or a holder for each"
        )
    if isinstance(module, QuantModule) or (own and hasattr(module, "input_quantizer")):
        raise QuantizationError(f"{name}: has quantizers already; expected a float module")
    for site in calls:
        _check_paths(module, site)


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
        if site.is_unseen or "." in site.holder or not site.holder or hasattr(module, site.holder):
            continue
        holder = ScaledDotProductAttention() if site.kind == "attention" else Call()
        module.add_module(site.holder, holder.train(module.training))
        added.append(site.holder)
    return added
