"""From quantized function calls in forwards of foreign classes to integer kernels.

The forward keeps running. What kernels need beside the weight, such as the stride of a convolution,
is seen in one run on the example.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq.graph import call_model
from torchq.lowering.eligible import as_linear, lower
from torchq.nn import QuantModule, convert_
from torchq.nn.calls.modules import ComputedCall, RoutedModule
from torchq.nn.calls.routes import CallSite, equivalent_class
from torchq.nn.modules.operators import Call

#: Kind of a call -> the names of its arguments.
_NAMES = {
    "linear": ("input", "weight", "bias"),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d"),
        ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    ),
}
_DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


class ProductCall(ComputedCall):
    """A call on an integer kernel; a call with other options than the known ones is simulated.

    The kernel is made of the calls that :attr:`seen` holds. :meth:`forward` has the input and the
    bias of the function, and its result.
    """

    def __init__(self, site: CallSite, holder: QuantModule) -> None:
        simulated = convert_(Call())
        assert isinstance(simulated, QuantModule)
        simulated.input_quantizer = holder.input_quantizer
        simulated.weight_quantizer = holder.weight_quantizer
        super().__init__(simulated.eval())
        self.site = site
        self.kernel = nn.Module()
        self.options: dict[str, Any] = {}
        self.seen: list[dict[str, Any]] | None = []

    def arguments(
        self, func: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[Any, ...] | None:
        """Return the input and the bias; None for a call that is simulated."""
        arguments = self._named(args, kwargs)
        if self.seen is not None:
            self.seen.append(arguments)
            return None
        if not arguments or any(
            arguments[name] != value for name, value in self.options.items()
        ):
            return None
        return arguments["input"], arguments["bias"]

    def _named(
        self, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> dict[str, object]:
        """Return the arguments of a call by name, with defaults; {} where no kernel knows them."""
        names = _NAMES[self.site.kind]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names) or not {"input", "weight"} <= set(arguments) <= set(
            names
        ):
            return {}
        return {name: arguments.get(name, _DEFAULTS.get(name)) for name in names}

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product, with the bias added."""
        y: Tensor = self.kernel(x)
        dims = int(self.site.kind[4]) if self.options else 0
        return y if bias is None else y + bias.view(-1, *[1] * dims)

    def settle(self) -> str:
        """Make the kernel; return why there is none, or an empty text."""
        recorded = self.seen
        self.seen = None
        if not recorded or not all(recorded):
            return "it was not called in the way that a layer computes"
        first = recorded[0]
        weight = first["weight"].detach()
        if not all(
            torch.equal(weight, arguments["weight"]) for arguments in recorded[1:]
        ):
            return "its weight changes between calls"
        quantizers = self.simulated.input_quantizer, self.simulated.weight_quantizer
        self.options = {name: first[name] for name in _DEFAULTS if name in first}
        if not self.options and weight.dim() != 2:
            return "its weight is no matrix"
        layer = (
            self._conv(weight) if self.options else as_linear(weight, None, *quantizers)
        )
        layer.input_quantizer, layer.weight_quantizer = quantizers
        kernel = lower(layer)
        if isinstance(kernel, str):
            return kernel
        self.kernel = kernel.eval()
        return ""

    def _conv(self, weight: Tensor) -> QuantModule:
        """Return a convolution without bias that computes the product of the call."""
        out, per_group, *size = weight.shape
        cls: Any = equivalent_class(self.site.kind)
        channels = per_group * self.options["groups"], out
        layer = cls(*channels, tuple(size), bias=False, device="meta", **self.options)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        conv = convert_(layer)
        assert isinstance(conv, QuantModule)
        return conv


def lower_calls_(model: nn.Module, example: object) -> dict[int, str]:
    """Let integer kernels compute the quantized calls of ``model``, as far as there are any.

    Return the id of each holder of quantizers, and why its calls have no kernel ("" if they have).
    """
    routed = [
        m for m in model.modules() if isinstance(m, RoutedModule) and m.torchq_calls
    ]
    if example is None:
        unseen = "only an example shows what its function calls do"
        return {
            id(holder): unseen for module in routed for _, holder in module.holders()
        }
    for module in routed:
        _watch(module)
    reasons: dict[int, str] = {}
    with torch.no_grad():
        if routed:
            call_model(model, example)
        for module in routed:
            for key, reason in _settle(module):
                reasons[key] = reasons.get(key, "") or reason
    return reasons


def _watch(module: RoutedModule) -> None:
    """Put a :class:`ProductCall` that sees the calls in the place of every holder."""
    sites = []
    for number, (site, holder) in enumerate(list(module.holders())):
        name = site.holder
        if isinstance(holder, QuantModule) and site.kind in _NAMES:
            name = f"{site.kind}_kernel_{number}"
            module.add_module(name, ProductCall(site, holder))
        sites.append(replace(site, holder=name))
    module.torchq_calls = (
        *sites,
        *(site for site in module.torchq_calls if site.is_unseen),
    )


def _settle(module: RoutedModule) -> list[tuple[int, str]]:
    """Give the calls of one module kernels; return the id of each holder and why it has none."""
    reasons = []
    sites = []
    unused = set()
    for site, call in list(module.holders()):
        holder, former = call, site
        reason = "kernels compute linear layers and convolutions"
        if site.kind == "attention":
            reason = (
                "attention is a kernel in a graph alone, and its forward keeps running"
            )
        if isinstance(call, ProductCall):
            former = call.site
            reason = call.settle()
            holder = module.get_submodule(former.holder) if former.holder else module
            if reason or isinstance(holder, Call):
                unused.add(site.holder if reason else former.holder)
        sites.append(former if reason else site)
        explained = (
            reason and f"its call of {site.kind} has no integer kernel: {reason}"
        )
        reasons.append((id(holder), explained))
    module.torchq_calls = (
        *sites,
        *(site for site in module.torchq_calls if site.is_unseen),
    )
    for name in unused:
        delattr(module, name)
    return reasons
