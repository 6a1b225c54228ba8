"""The first layers of a network, where they have many results and few products for each.

An integer kernel saves time on products, and loses it on results: a convolution of an image with
three channels has 27 products for each result, and an activation behind it may have no fast integer
kernel. Deeper layers have fewer results, and hundreds of products for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.graph import call_model, tensors_in
from torchq.nn import QuantConv2d, QuantLinear, QuantModule
from torchq.swap.decision import Decision
from torchq.swap.flow.calls import is_depthwise
from torchq.swap.flow.float_runs import computing_in_float
from torchq.swap.targets import IntegerGains, Target

__all__ = ["float_start"]

_IMAGE_CHANNELS = 4
#: Float kernels are slow for depthwise convolutions whose channels are no multiple of the first
#: number. They fill up the input channels of other convolutions to a multiple of the second one.
_ALIGNMENT, _BLOCK = 4, 16
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)


@dataclass
class _Value:
    """A tensor that quantized modules read.

    Attributes:
        elements: how many.
        first: index of the first call that comes after it.
        last: index of the last call that reads it.
        pooled: max pooling computes or reads it.
    """

    elements: int
    first: int
    last: int
    pooled: bool = False


def float_start(
    model: nn.Module, decisions: Sequence[Decision], target: Target, example: Any
) -> dict[str, str]:
    """Return the first modules and operators of a model, if a target runs them faster in float.

    Before: the model is quantized as ``decisions`` say. After, once the plan is made without these:
    the model begins in float, up to where the time that the target's :class:`IntegerGains` predict
    is least, and runs on integers from there. Nothing stays float that saves less than they ask.

    Args:
        model: quantized; it runs once on ``example`` with all quantizers off, in eval mode.
        decisions: all of them. A module whose rule is its path is left alone.
        target: the runtime.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.

    Returns:
        Path -> the reason.
    """
    gains = target.integer_gains
    if gains is None:
        return {}
    run = _Run(gains)
    run.record(model, example)
    end = run.best_end()
    if not end:
        return {}
    movable = {n for d in decisions if not d.reason and d.rule not in d.names for n in d.names}
    last = run.names[end - 1]
    reason = f"{target.name} runs the first layers, up to {last}, faster in float"
    names = dict.fromkeys(run.names[:end])
    return {n: reason for n in names if n in movable and n not in run.names[end:]}


class _Run:
    """What one run shows: the calls of quantized modules, in order, and the tensors they read.

    Attributes:
        names: path of the module of each call.
    """

    def __init__(self, gains: IntegerGains) -> None:
        self.names: list[str] = []
        self._gains = gains
        self._saved: list[float] = []  # nanoseconds, by integers, at each call
        self._values: list[_Value] = []
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def record(self, model: nn.Module, example: Any) -> None:
        """Run a model on an example with all quantizers off, and note what its modules do."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                if isinstance(module, QuantModule) and not module.is_container and module.slots():
                    note = partial(self._note, name)
                    stack.callback(module.register_forward_hook(note).remove)
            stack.enter_context(computing_in_float(model))
            call_model(model, example)

    def _note(self, name: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        index, pooled = len(self.names), isinstance(module, _MAX_POOLS)
        for tensor in tensors_in(args):
            if tensor not in self._known:  # The result of a function, such as a ReLU.
                self._keep(tensor, index)
            self._known[tensor].last = index
            self._known[tensor].pooled |= pooled
        results = list(tensors_in(result))
        each = _gain(module, self._gains, is_first=not index)
        self._saved.append(each * sum(tensor.numel() for tensor in results))
        self.names.append(name)
        for tensor in results:
            self._keep(tensor, index + 1, pooled)

    def _keep(self, tensor: Tensor, first: int, pooled: bool = False) -> None:
        self._values.append(_Value(tensor.numel(), first, first - 1, pooled))
        self._known[tensor] = self._values[-1]

    def best_end(self) -> int:
        """Return how many calls from the first one on are best made in float."""
        costs = [self._boundary(end) for end in range(len(self.names))]
        totals = [
            costs[0] - cost - saved
            for cost, saved in zip(costs, accumulate([0.0, *self._saved]), strict=False)
        ]
        most = max(totals, default=0.0)
        return totals.index(most) if most >= max(self._gains.least, 1e-9) else 0

    def _boundary(self, end: int) -> float:
        """Return the nanoseconds of changing to integers in front of a call."""
        return sum(
            v.elements * (self._gains.pooled_boundary if v.pooled else self._gains.boundary)
            for v in self._values
            if v.first <= end <= v.last
        )


def _gain(module: nn.Module, gains: IntegerGains, *, is_first: bool) -> float:
    """Return the nanoseconds that integers save for each element of the result of a module."""
    if isinstance(module, QuantLinear):
        return gains.product * module.in_features + gains.result
    if not isinstance(module, QuantConv2d):
        assert isinstance(module, QuantModule)
        return gains.modules.get(type(module).float_class.__name__, 0.0)
    if is_depthwise(module):
        is_aligned = module.groups % _ALIGNMENT == 0
        return gains.depthwise if is_aligned else gains.unaligned_depthwise
    channels, size = module.in_channels // module.groups, math.prod(module.kernel_size)
    if is_first and module.in_channels <= _IMAGE_CHANNELS:
        return gains.image_product * channels * size + gains.image_result
    read = -(-channels // _BLOCK) * _BLOCK
    return gains.product * read * size + gains.result
