"""A product with a weight that a forward of somebody else's class computes by a function call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq.nn import CallSite, ComputedCall, QuantModule

__all__ = ["ProductCall", "bound_arguments"]

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_CONV[:5], "output_padding", "groups", "dilation")
_DEFAULTS: dict[str, Any] = {
    "bias": None,
    "stride": 1,
    "padding": 0,
    "output_padding": 0,
    "dilation": 1,
    "groups": 1,
    "beta": 1,
    "alpha": 1,
}
#: Kind of a call -> the names of its arguments; those of the operands are the same for all kinds.
_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "weight"),
    "addmm": ("bias", "input", "weight"),
    "conv1d": _CONV,
    "conv2d": _CONV,
    "conv3d": _CONV,
    "conv_transpose1d": _TRANSPOSED,
    "conv_transpose2d": _TRANSPOSED,
    "conv_transpose3d": _TRANSPOSED,
}
_KEYWORDS = {"mat1": "input", "mat2": "weight"}


def bound_arguments(
    site: CallSite, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with defaults; None where no kernel knows them.

    Args:
        site: The call.
        args: The positional arguments.
        kwargs: The keyword arguments.

    Returns:
        ``input``, ``weight`` and ``bias``, and the options, such as ``stride``.
    """
    kind, names = site.kind, _NAMES.get(site.kind)
    if names is None or len(args) > len(names):
        return None
    if site.weight_is_left:
        if kind != "matmul":
            return None
        names = ("weight", "input")
    given = dict(zip(names, args, strict=False))
    for key, value in kwargs.items():
        if kind == "addmm" and key == "input":
            key = "bias"
        given[names[1] if key == "other" else _KEYWORDS.get(key, key)] = value
    options = ("beta", "alpha") if kind == "addmm" else ()
    if not {"input", "weight"} <= set(given) <= {*names, *options}:
        return None
    return {name: given.get(name, _DEFAULTS.get(name)) for name in (*names, *options)}


class ProductCall(ComputedCall):
    """A call on an integer kernel; a call with other options than the known ones is simulated.

    Args:
        kernel: A layer without bias that computes the product.
        simulated: Has the quantizers of the call.
        site: The call. A weight on the left multiplies columns, so the kernel, which multiplies
            rows, gets the input transposed.
        options: The arguments of the call other than tensors, by name.
        ndim: The number of dimensions of the input of a convolution; 0 for linear layers.

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
        if self.site.weight_is_left and given["input"].dim() < 2:
            return None
        return given["input"], given.get("bias")

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product, with the bias added."""
        if self.site.weight_is_left:
            product: Tensor = self.kernel(x.transpose(-1, -2)).transpose(-1, -2)
            return product
        y: Tensor = self.kernel(x)
        if bias is None:
            return y
        return y + (bias.view(-1, *[1] * (self.ndim - 2)) if self.ndim else bias)
