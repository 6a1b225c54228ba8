"""Which tensors of a run hold the same values, and which hold no negative ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq.graph.calling import address_of, tensors_in, version_of
from torchq.graph.operators import (
    effects_of,
    function_name,
    never_negative,
    operator_name,
)

_COPIES = frozenset(["alias", "clone", "contiguous", "detach", "pos", "positive"])
_CASTS = frozenset(["bfloat16", "double", "float", "half", "to", "type", "type_as"])
_SUMS = frozenset(["add", "iadd", "radd"])
_DIFFERENCES = frozenset(["isub", "sub", "subtract"])
_PRODUCTS = frozenset(["imul", "mul", "multiply", "rmul"])
_QUOTIENTS = frozenset(["div", "divide", "itruediv", "true_divide", "truediv"])


def adds_zeros(
    function: str, arguments: Sequence[object], options: Mapping[str, object]
) -> bool:
    """Return True for a call that pads a tensor with zeros; ``arguments`` are those behind it."""
    values = {**dict(zip(("pad", "mode", "value"), arguments, strict=False)), **options}
    return (
        function == "pad"
        and values.get("mode") in (None, "constant")
        and not values.get("value")
    )


def returned_operand(
    function: Callable[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, Any],
    is_fixed: Callable[[Tensor], bool],
) -> Tensor | None:
    """Return the operand that a call returns, or copies, whatever its values are; else None.

    The call multiplies or divides by one, adds or subtracts zero, copies, or casts: whoever asks
    compares the type and the shape of the result with those of the operand. ONNX Runtime removes
    these. It keeps powers of one, and tensors of several ones or zeros.

    Args:
        function: what is called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        is_fixed: says of a tensor that it holds the same numbers in every call.
    """
    name = function_name(function).strip("_")
    first, second, *_ = (*args, kwargs.get("other"), None, None)
    kept: object = None
    if name in _COPIES or name in _CASTS or _takes_all(name, second):
        kept = first
    elif name in _PRODUCTS:
        is_one = [_number_of(operand, is_fixed) == 1 for operand in (first, second)]
        kept = first if is_one[1] else second if is_one[0] else None
    elif name in _QUOTIENTS and kwargs.get("rounding_mode") is None:
        kept = first if _number_of(second, is_fixed) == 1 else None
    elif name in _SUMS or name in _DIFFERENCES:
        kept = _beside_zero(name, first, second, kwargs.get("alpha", 1), is_fixed)
    return kept if isinstance(kept, Tensor) else None


def has_form_of(result: object, operand: Tensor | None) -> bool:
    """Return True for a result with the shape, type and device of an operand."""
    return (
        isinstance(result, Tensor)
        and operand is not None
        and result.shape == operand.shape
        and result.dtype == operand.dtype
        and result.device == operand.device
    )


def _takes_all(name: str, places: object) -> bool:
    """Return True for ``x[:]`` and its like."""
    if name != "getitem":
        return False
    every = places if isinstance(places, tuple) else (places,)
    # A comparison with a tensor would be a tensor.
    return all(
        place is Ellipsis or (isinstance(place, slice) and place == slice(None))
        for place in every
    )


def _beside_zero(
    name: str,
    first: object,
    second: object,
    alpha: float,
    is_fixed: Callable[[Tensor], bool],
) -> object:
    """Return the operand of a sum or difference that zero is added to, or subtracted from."""
    number = _number_of(second, is_fixed)
    if number is not None and number * alpha == 0:
        return first
    is_sum = name in _SUMS and alpha == 1
    return second if is_sum and _number_of(first, is_fixed) == 0 else None


def _number_of(
    value: object, is_fixed: Callable[[Tensor], bool]
) -> int | float | complex | None:
    """Return a number, or the only one of a tensor that is the same in every call."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and is_fixed(value) else None
    return value if isinstance(value, (int, float)) else None


class ValueTracker:
    """Follows values through the functions of a run: :func:`torchq.graph.record` calls it.

    A tensor has the root of another one where elements only moved, max pooling chose some, zeros
    were added around an image, or the numbers are the same ones.
    """

    def __init__(self) -> None:
        self._root: dict[int, int] = {}
        # An id is unique while its tensor lives; the copy shows changes in place.
        self._alive: dict[int, tuple[Tensor, Tensor]] = {}
        self._count = 0
        self._nonnegative: dict[int, tuple[Tensor, int]] = {}

    def run(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Mapping[str, Any],
        returned: Tensor | None = None,
    ) -> Any:
        """Carry out a function; the result of one that moves values has the root of its input.

        ``returned`` is the operand that the function returns, if it does; see
        :func:`returned_operand`.
        """
        name = operator_name(function)
        proved = never_negative(name, args, kwargs, self.is_nonnegative)
        proved |= returned is not None and self.is_nonnegative(returned)
        out = function(*args, **kwargs)
        for tensor in tensors_in(out) if proved else ():
            self._nonnegative[id(tensor)] = (tensor, version_of(tensor))
        moves = not {"move", "max"}.isdisjoint(effects_of(name))
        moves |= adds_zeros(name, args[1:], kwargs)
        source = returned if returned is not None else args[0] if args else None
        moves |= has_form_of(out, returned)
        if moves and isinstance(source, Tensor) and isinstance(out, Tensor):
            root = self.root_of(source)
            if not self._is_known(out):
                self._keep(out, root, self._copy_behind_view(source, out))
        return out

    def is_nonnegative(self, tensor: Tensor) -> bool:
        """Return True if operators show that a tensor holds no negative value."""
        noted = self._nonnegative.get(id(tensor))
        return noted is not None and noted[1] == version_of(tensor)

    def root_of(self, tensor: Tensor) -> int:
        """Return the number that stands for the values of a tensor."""
        if not self._is_known(tensor):
            self._keep(tensor, self._count)
            self._count += 1
        return self._root[id(tensor)]

    def _is_known(self, tensor: Tensor) -> bool:
        noted = self._alive.get(id(tensor))
        # What has no memory of its own cannot be compared.
        if noted is None or address_of(tensor) is None:
            return False
        return torch.equal(noted[1], tensor)

    def _keep(self, tensor: Tensor, root: int, copy: Tensor | None = None) -> None:
        copy = tensor.clone() if copy is None else copy
        self._alive[id(tensor)] = (tensor, copy)
        self._root[id(tensor)] = root

    def _copy_behind_view(self, source: Tensor, view: Tensor) -> Tensor | None:
        """Return the copy of a source in the shape of a view of all of it; None for other results.

        Most moves are views of whole tensors, and a second copy of the same numbers would take as
        long as the layers that are recorded.
        """
        is_whole = (
            None not in (address_of(view), address_of(source))
            and view.data_ptr() == source.data_ptr()
            and view.numel() == source.numel()
            and view.dtype == source.dtype
            and view.is_contiguous()
            and source.is_contiguous()
        )
        return self._alive[id(source)][1].view(view.shape) if is_whole else None

    def forget(self) -> None:
        """Let the tensors go."""
        self._alive.clear()
        self._nonnegative.clear()
