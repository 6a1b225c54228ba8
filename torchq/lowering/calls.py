"""From quantized function calls in forwards of foreign classes to integer kernels.

The forward keeps running. What kernels need beside the weight, such as the stride of a convolution,
is recorded in one run on the example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model
from torchq.lowering.eligible import as_linear, lower
from torchq.nn import QuantModule, convert_
from torchq.nn.calls.functions import CallSite, equivalent_class
from torchq.nn.calls.modules import ComputedCall, RoutedModule
from torchq.nn.modules.operators import Call

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
#: Kind of a call -> the names of its arguments.
_NAMES = {
    "linear": _CONV[:3],
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _CONV),
}
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def bound_arguments(
    site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with defaults; None where no kernel knows them."""
    names = _NAMES.get(site.kind, ())
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if len(args) > len(names) or not {"input", "weight"} <= set(given) <= set(names):
        return None
    return {name: given.get(name, _DEFAULTS.get(name)) for name in names}


class ProductCall(ComputedCall):
    """A call on an integer kernel; a call with other options than the known ones is simulated.

    Shape:
        That of the function.
    """

    def __init__(
        self,
        kernel: nn.Module,
        simulated: QuantModule,
        site: CallSite,
        options: dict[str, Any],
        ndim: int,
    ) -> None:
        super().__init__(simulated)
        self.kernel = kernel
        self.site, self.options, self.ndim = site, options, ndim

    def arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return the input and the bias."""
        given = bound_arguments(self.site, args, kwargs)
        if given is None or any(given[name] != value for name, value in self.options.items()):
            return None
        return given["input"], given.get("bias")

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product, with the bias added."""
        y: Tensor = self.kernel(x)
        if bias is None:
            return y
        return y + (bias.view(-1, *[1] * (self.ndim - 2)) if self.ndim else bias)


_ATTENTION = "attention is a kernel in a graph alone, and its forward keeps running"


def lower_calls_(model: nn.Module, example: Any, reduce_range: bool) -> dict[int, str]:
    """Let integer kernels compute the quantized calls of ``model``, as far as there are any."""
    modules = model.modules()
    routed = [m for m in modules if isinstance(m, RoutedModule) and m.torchq_calls]
    if example is None:
        holders = [holder for module in routed for _, holder in module.holders()]
        return {
            id(holder): "only an example shows what its function calls do" for holder in holders
        }
    reasons: dict[int, str] = {}
    with torch.no_grad():
        if routed:
            with _recording(routed) as recorders:
                call_model(model, example)
        for module in routed:
            for key, reason in _lower_module(module, recorders[id(module)], reduce_range):
                reasons[key] = reasons.get(key, "") or reason
    return reasons


@dataclass
class _Seen:
    """What one call of a forward looked like: its arguments by name, and its quantizers."""

    simulated: QuantModule
    arguments: list[dict[str, Any]] = field(default_factory=list)


class _Recorder(ComputedCall):
    """Notes the arguments of a call, which is simulated."""

    def __init__(self, seen: _Seen, site: CallSite) -> None:
        super().__init__(seen.simulated)
        self.seen, self.site = seen, site

    def arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Note the arguments, and leave the call to the quantizers."""
        self.seen.arguments.append(bound_arguments(self.site, args, kwargs) or {})
        return None


@contextmanager
def _recording(routed: list[RoutedModule]) -> Iterator[Mapping[int, list[_Seen | None]]]:
    """Put a recorder in the place of every holder of quantizers until the block ends."""
    found: dict[int, list[_Seen | None]] = {id(module): [] for module in routed}
    calls = [(module, module.torchq_calls) for module in routed]
    added: list[tuple[nn.Module, str]] = []
    try:
        for module, sites in calls:
            for number, (site, holder) in enumerate(list(module.holders())):
                seen, name = None, f"recorded_{number}"
                if isinstance(holder, QuantModule) and site.kind != "attention":
                    seen = _Seen(_quantizers_of(holder))
                    module.add_module(name, _Recorder(seen, site))
                    added.append((module, name))
                    sites = (*sites[:number], replace(site, holder=name), *sites[number + 1 :])
                found[id(module)].append(seen)
            module.torchq_calls = sites
        yield found
    finally:
        for owner, former in calls:
            owner.torchq_calls = former
        for parent, name in added:
            delattr(parent, name)


def _quantizers_of(holder: QuantModule) -> QuantModule:
    """Return a module that has the quantizers of another one, and nothing else."""
    call = convert_(Call())
    assert isinstance(call, QuantModule)
    call.input_quantizer, call.weight_quantizer = holder.input_quantizer, holder.weight_quantizer
    return call.eval()


def _lower_module(
    module: RoutedModule, calls: list[_Seen | None], reduce_range: bool
) -> list[tuple[int, str]]:
    """Give the calls of one module kernels; return the id of each holder and why it has none."""
    reasons, sites = [], [site for site, _ in module.holders()]
    for number, (site, seen) in enumerate(zip(list(sites), calls, strict=True)):
        holder = module.get_submodule(site.holder) if site.holder else module
        new = _ATTENTION if seen is None else _product_call(site, seen, reduce_range)
        if isinstance(new, str):
            new = f"its call of {site.kind} has no integer kernel: {new}"
            reasons.append((id(holder), new))
            continue
        reasons.append((id(holder), ""))
        name = f"{site.kind}_kernel_{number}"
        if isinstance(holder, Call):
            delattr(module, site.holder)
        module.add_module(name, new.eval())
        sites[number] = replace(site, holder=name)
    unseen = [site for site in module.torchq_calls if site.is_unseen]
    module.torchq_calls = (*sites, *unseen)
    return reasons


def _product_call(site: CallSite, seen: _Seen, reduce_range: bool) -> ProductCall | str:
    """Return what computes a call that was recorded, or why there is no kernel."""
    if site.kind not in _NAMES:
        return "kernels compute linear layers and convolutions"
    if not seen.arguments or not all(seen.arguments):
        return "it was not called in the way that a layer computes"
    first = seen.arguments[0]
    options = {name: first[name] for name in _DEFAULTS if name in first}
    weight = first["weight"].detach()
    if not all(torch.equal(weight, given["weight"]) for given in seen.arguments[1:]):
        return "its weight changes between calls"
    if site.kind == "linear":
        if weight.dim() != 2:
            return "its weight is no matrix"
        x, w = seen.simulated.input_quantizer, seen.simulated.weight_quantizer
        kernel = lower(as_linear(weight, None, x, w), reduce_range)
    else:
        kernel = lower(_conv(site.kind, weight, options, seen.simulated), reduce_range)
    if isinstance(kernel, str):
        return kernel
    ndim = weight.dim() if site.kind.startswith("conv") else 0
    return ProductCall(kernel.eval(), seen.simulated, site, options, ndim)


def _conv(
    kind: str, weight: Tensor, options: Mapping[str, Any], simulated: QuantModule
) -> QuantModule:
    """Return a quantized convolution without bias that computes the product of a call."""
    out, per_group, *size = weight.shape
    cls: Any = equivalent_class(kind)
    channels = per_group * options["groups"], out
    layer = cls(*channels, tuple(size), bias=False, device="meta", **options)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    conv = convert_(layer)
    assert isinstance(conv, QuantModule)
    conv.input_quantizer = simulated.input_quantizer
    conv.weight_quantizer = simulated.weight_quantizer
    return conv
