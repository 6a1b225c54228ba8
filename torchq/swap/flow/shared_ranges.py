"""One range for one tensor: quantizers that read the same values become one quantizer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.formats import PerTensor
from torchq.graph import MAX_POOLING, REARRANGING, call_model
from torchq.nn import QuantModule, TensorQuantizer, share_quantizers_
from torchq.swap.flow.float_runs import computing_in_float

_MOVES = REARRANGING | MAX_POOLING


def share_common_ranges_(model: nn.Module, example: Any) -> list[list[str]]:
    """Let quantizers of one tensor be one, also across max pooling and reshapes, in place.

    All inputs of a concatenation have one range, so whatever else reads these tensors gets that
    range too: a layer whose result is quantized with two scales would stay float.

    Before: each place has a quantizer of its own. After: places that read the same values have
    the same quantizer, if their descriptors and modes are equal.
    """
    paths: dict[int, str] = {}
    of_weights: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, QuantModule):
            of_weights |= {id(q) for q, _ in module.quantized_weights()}
        if isinstance(module, TensorQuantizer):
            paths[id(module)] = path
    chosen = {key: path for key, path in paths.items() if key not in of_weights}
    flow = _ValueFlow()
    with ExitStack() as stack:
        for module in model.modules():
            if id(module) in chosen:
                stack.callback(module.register_forward_pre_hook(flow.note).remove)
        stack.enter_context(computing_in_float(model))
        with flow:
            call_model(model, example)
    return [_share_(model, group, chosen) for group in flow.groups() if len(group) > 1]


def _share_(model: nn.Module, group: list[TensorQuantizer], paths: dict[int, str]) -> list[str]:
    first = group[0].descriptor.replace(name=None)
    alike = [
        paths[id(q)]
        for q in group
        if q.descriptor.replace(name=None) == first and q.mode == group[0].mode
    ]
    if len(alike) > 1 and first.granularity == PerTensor():
        share_quantizers_(model, alike)
    return alike


class _ValueFlow(TorchFunctionMode):
    """Notes which quantizers see the same values, while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._origin: dict[int, int] = {}
        # An id is unique while its tensor lives; the copy shows changes in place.
        self._alive: dict[int, tuple[Tensor, Tensor]] = {}
        self._seen: dict[int, list[TensorQuantizer]] = {}

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Carry out ``func``; the result of one that moves values has the origin of its input."""
        out = func(*args, **(kwargs or {}))
        moves = getattr(func, "__name__", "") in _MOVES
        if moves and args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            origin = self._root(args[0])
            if self._known(out) is None:
                self._keep(out)
                self._origin[id(out)] = origin
        return out

    def _known(self, tensor: Tensor) -> Tensor | None:
        kept = self._alive.get(id(tensor))
        return None if kept is None or not torch.equal(kept[1], tensor) else tensor

    def _keep(self, tensor: Tensor) -> None:
        self._alive[id(tensor)] = (tensor, tensor.clone())

    def _root(self, tensor: Tensor) -> int:
        if self._known(tensor) is None:
            self._keep(tensor)
            self._origin[id(tensor)] = len(self._seen)
            self._seen[len(self._seen)] = []
        return self._origin[id(tensor)]

    def note(self, quantizer: nn.Module, args: tuple[Any, ...]) -> None:
        """Enter a quantizer that is called on ``args[0]``; a forward pre-hook."""
        users = self._seen[self._root(args[0])]
        if isinstance(quantizer, TensorQuantizer) and all(user is not quantizer for user in users):
            users.append(quantizer)

    def groups(self) -> list[list[TensorQuantizer]]:
        """Return quantizers that see the same values; one that sees several tensors joins them."""
        groups: list[list[TensorQuantizer]] = []
        for users in self._seen.values():
            touching = [g for g in groups if any(a is b for a in g for b in users)]
            merged = [q for g in touching for q in g]
            merged += [q for q in users if all(q is not other for other in merged)]
            groups = [g for g in groups if all(g is not other for other in touching)] + [merged]
        return groups
