"""Which tensors of a run hold the same values, and which hold no negative ones."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq.graph.calling import address_of, tensors_in, version_of
from torchq.graph.operators import effects_of, never_negative, operator_name


def adds_zeros(
    function: str, arguments: Sequence[Any], options: Mapping[str, Any]
) -> bool:
    """Return True for a call that pads a tensor with zeros; ``arguments`` are those behind it."""
    values = {**dict(zip(("pad", "mode", "value"), arguments, strict=False)), **options}
    return (
        function == "pad"
        and values.get("mode") in (None, "constant")
        and not values.get("value")
    )


class ValueTracker:
    """Follows values through the functions of a run: :func:`torchq.graph.record` calls it.

    A tensor has the root of another one where elements only moved, max pooling chose some, or zeros
    were added around an image.
    """

    def __init__(self) -> None:
        self._root: dict[int, int] = {}
        # An id is unique while its tensor lives; the copy shows changes in place.
        self._alive: dict[int, tuple[Tensor, Tensor]] = {}
        self._count = 0
        self._nonnegative: dict[int, tuple[Tensor, int]] = {}

    def run(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Carry out a function; the result of one that moves values has the root of its input."""
        name = operator_name(function)
        proved = never_negative(name, args, kwargs, self.is_nonnegative)
        out = function(*args, **kwargs)
        for tensor in tensors_in(out) if proved else ():
            self._nonnegative[id(tensor)] = (tensor, version_of(tensor))
        moves = not {"move", "max"}.isdisjoint(effects_of(name))
        moves |= adds_zeros(name, args[1:], kwargs)
        if moves and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            root = self.root_of(args[0])
            if not self._is_known(out):
                self._keep(out, root)
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

    def _keep(self, tensor: Tensor, root: int) -> None:
        self._alive[id(tensor)] = (tensor, tensor.clone())
        self._root[id(tensor)] = root

    def forget(self) -> None:
        """Let the tensors go."""
        self._alive.clear()
        self._nonnegative.clear()
