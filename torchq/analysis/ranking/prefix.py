"""Runs of a model that start where something changed, with values kept of an earlier run.

Whatever the code of a model looks like, modules that returned before a quantizer was first called
return the same again when this quantizer alone changes. So what they returned stands for their
calls: of a whole block where that is possible, and else of its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.ranking.calls import Call, Forwards, Key, largest_before, observe
from torchq.analysis.ranking.groups import Group
from torchq.graph import Forward, call_model, move_to, tensors_in

__all__ = ["Runs"]


class Runs:
    """Runs one model on one batch after the other, whole or from some group on.

    Args:
        model: in eval mode.
        forward: the user's own way to run it.
        device: where tensors are moved.
        groups: what is switched.

    Attributes:
        note: why every run is a whole one; empty where runs start in the middle.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward | None,
        device: torch.device | None,
        groups: Sequence[Group],
    ) -> None:
        self.model, self.forward, self.device, self.groups = model, forward, device, groups
        self.note = ""
        self._forwards = Forwards(model)
        self._batch: Any = None
        self._calls: list[Call] = []
        self._starts: dict[str, int] = {}
        self._kept: dict[Key, Any] = {}

    def reference(self, batch: Any, todo: Iterable[Group]) -> Any:
        """Run a batch whole, and keep the values that runs from groups on will need.

        Args:
            batch: what to run.
            todo: groups that are going to be switched.

        Returns:
            The output of the model.
        """
        self._batch = batch if self.device is None else move_to(batch, self.device)
        todo = list(todo)
        is_first = not self._calls
        if not is_first:
            output, order = self._keep(todo)
            if order == [call.key for call in self._calls]:
                return output
            # For this batch the model calls other modules.
        self._calls = observe(self._forwards, self.again)
        self._starts = dict(self._found_starts())
        output, _ = self._keep(todo)
        if is_first:
            self._check(output)
        return output

    def _found_starts(self) -> Iterable[tuple[str, int]]:
        first: dict[int, int] = {}
        for call in self._calls:
            first.setdefault(call.key[0], call.enter)
        for group in self.groups:
            layers = [self.model.get_submodule(name) for name in group.layers]
            parts = [id(part) for part in (*layers, *group.quantizers.values())]
            if places := [first[part] for part in parts if part in first]:
                yield group.name, min(places)

    def _keep(self, todo: Iterable[Group]) -> tuple[Any, list[Key]]:
        """Run the batch, keep values, and return the output and the calls that were made."""
        self._kept, order = {}, []
        needed: dict[Key, Call] = {}
        for group in todo:
            needed |= self._reused(group)

        def keep(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            key = self._forwards.key(module)
            order.append(key)
            result = forward(*args, **kwargs)
            if key in needed:
                self._kept[key] = result.clone() if needed[key].is_changed else result
            return result

        with self._forwards.handled(keep):
            return self.again(), order

    def _reused(self, group: Group) -> dict[Key, Call]:
        """Return the calls that a run from ``group`` on leaves out."""
        if self.note or group.name not in self._starts:
            return {}
        return largest_before(self._calls, self._starts[group.name])

    def _check(self, expected: Any) -> None:
        """Start at the last group with nothing switched, which has to change nothing."""
        if not self._starts:
            return
        last = max(self.groups, key=lambda group: self._starts.get(group.name, -1))
        if not _are_equal(self.switched(last), expected):
            self.note = "each run is a whole one, as modules of this model share more than values"

    def is_reached(self, group: Group) -> bool:
        """Return True where the last batch reaches a quantizer of the group, or its layer."""
        return group.name in self._starts

    def again(self) -> Any:
        """Run the last batch again, whole."""
        return call_model(self.model, self._batch, forward=self.forward)

    def switched(self, group: Group) -> Any:
        """Run the last batch again, from the first call that ``group`` may change on."""
        reused = self._reused(group)

        def skip(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
            key = self._forwards.key(module)
            if key not in reused or key not in self._kept:
                return forward(*args, **kwargs)
            self._forwards.counts.update(reused[key].inside)
            kept = self._kept[key]
            return kept.clone() if reused[key].is_changed else kept

        with self._forwards.handled(skip):
            return self.again()


def _are_equal(found: Any, expected: Any) -> bool:
    """Return True where two outputs hold the same tensors, bit for bit; NaN equals NaN."""
    pairs = list(tensors_in(found)), list(tensors_in(expected))
    return len(pairs[0]) == len(pairs[1]) and all(map(_are_same, *pairs))


def _are_same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
