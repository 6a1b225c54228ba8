"""Ranges of concatenations that other ranges nearly equal: they become the same.

The result of a concatenation is on the grid of its quantizer. What reads it has a range of its own,
as another concatenation in a chain of them has, such as in a dense block that joins each result to
all before it, whose range holds more tensors. Where that is a little longer, codes move to a grid
with a step a little longer, and all small codes stay what they are: 8.41 in place of 8.28 makes
each of these values 1.5 % larger. That is no noise that averages out, and every link of a chain
adds to it. With one range for both the codes are the same.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchq.formats import PerTensor
from torchq.graph import version_of
from torchq.nn import Cat, TensorQuantizer
from torchq.utils import watching

#: How much longer the second range is at most. Rounding to both grids has the noise of both steps
#: where the second is read, and that of the first where the first is; the longer range alone has
#: its own noise at both: less, below the root of 2.
_NEARLY = math.sqrt(2)


class Concatenations:
    """Which quantizers read results of concatenations, in a run in float.

    Args:
        model: quantized.
        chosen: path -> quantizer that calibration sets.
    """

    def __init__(self, model: nn.Module, chosen: Mapping[str, TensorQuantizer]) -> None:
        self._chosen = dict(chosen)
        path_by_id = {id(quantizer): path for path, quantizer in chosen.items()}
        #: Concatenations with one range, each with the path of its quantizer.
        self._cats: list[tuple[Cat, str]] = []
        for module in model.modules():
            own = getattr(module, "input_quantizer", None)
            if isinstance(module, Cat) and module.ranges == 1 and id(own) in path_by_id:
                self._cats.append((module, path_by_id[id(own)]))
        #: Paths of the quantizer of a concatenation and of one that reads its result, in order.
        self.pairs: dict[tuple[str, str], None] = {}
        self._results: list[tuple[weakref.ref[Tensor], int, str]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at what the quantizers read inside the ``with`` block."""
        given = [(cat, partial(self._give, path)) for cat, path in self._cats]
        readers = self._chosen.items() if given else ()
        read = [(quantizer, partial(self._read, path)) for path, quantizer in readers]
        with watching(given), watching(read, before=True):
            yield
        self._results.clear()

    def _give(self, path: str, args: Any, kwargs: Any, result: Tensor) -> None:
        alive = [entry for entry in self._results if entry[0]() is not None]
        self._results = [*alive, (weakref.ref(result), version_of(result), path)]

    def _read(self, path: str, args: Any, kwargs: Any, _: None) -> None:
        x: Tensor = args[0] if args else kwargs["x"]
        for reference, version, giver in self._results:
            if reference() is x and version_of(x) == version and giver != path:
                self.pairs[giver, path] = None


def make_equal_(
    concatenations: Concatenations,
    chosen: Mapping[str, TensorQuantizer],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give quantizers of concatenations the range of those that read them and nearly equal it.

    Args:
        concatenations: what a run has shown.
        chosen: path -> quantizer that calibration has set.
        group: processes that have the same ranges.
    """
    pairs = _of_first_rank(list(concatenations.pairs), group)
    # From the end on, so that the range of the last one of a chain reaches the first.
    for giver, reader in reversed(pairs):
        first, second = chosen[giver], chosen[reader]
        if may_be_equal(first, second):
            ratio = float(_step(second) / _step(first))
            if 1 < ratio < _NEARLY:
                first.range = second.range.map(torch.clone)


def _of_first_rank(
    pairs: list[tuple[str, str]], group: dist.ProcessGroup | None
) -> Sequence[tuple[str, str]]:
    """Return the pairs of the first rank that has any."""
    if group is None:
        return pairs
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, pairs, group=group)
    return next((found for found in gathered if found), [])


def may_be_equal(first: TensorQuantizer, second: TensorQuantizer) -> bool:
    """Return True for two quantizers with a range each whose codes are of one kind."""
    one, other = (q.descriptor.replace(name=None) for q in (first, second))
    return one == other and all(
        q.quantizing
        and q.calibrated
        and q.delegate is None
        and q.pre_quant_scale is None
        and not q.descriptor.dynamic
        and not q.descriptor.learn_amax
        and q.descriptor.format.is_integer
        and q.descriptor.granularity == PerTensor()
        and not bool(q.dead_ranges().any())
        for q in (first, second)
    )


def _step(quantizer: TensorQuantizer) -> Tensor:
    return quantizer.range.qparams(quantizer.descriptor.format).scale
