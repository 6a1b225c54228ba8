"""An estimate of each layer's cost from gradients: a few backward passes for all layers together.

A layer that is quantized alone moves its output by ``d``. To second order this changes the
divergence of the class probabilities by ``d' F d / 2``, where ``F`` is the Fisher information at
that output. The Fisher information of the scores is known: ``diag(p) - p p'`` for probabilities
``p``. So for random directions of the scores with this second moment, ``F`` is the mean of
``g g'``, with ``g`` the gradient along them, and the cost is the mean of ``(g . d)**2 / 2``.
Reference: Martens, New Insights and Perspectives on the Natural Gradient Method (2020), sections 5
and 9.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.metrics import Sums, add_sums, batch_size, class_axis, floats_in, scores_in
from torchq.errors import ConfigError
from torchq.graph import map_tensors
from torchq.utils import watching

#: Backward passes for each batch.
PROBES = 4

#: Returns what a module would return under some quantization, given its arguments.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Disturbance:
    """One way to quantize one module; ``run`` computes the output that it would have.

    The cost is added to that of ``key``: a group, or a layer with a format.
    """

    key: Any
    module: nn.Module
    run: Run


def fisher_costs(
    call: Callable[[Any], Any], batches: Iterable[Any], disturbances: Collection[Disturbance]
) -> dict[Any, float]:
    """Return the estimate of each key, for one prediction; those of one key happen together.

    ``call`` runs the float model on a batch. A ConfigError says that its output has no gradient
    with respect to the layers, or no classes.
    """
    total: Sums = {}
    for number, batch in enumerate(batches):
        taps = _Taps(disturbances)
        with torch.enable_grad(), watching(taps.hooks()):
            scores = _class_scores(call(batch))
        if taps.points:
            gradients = _drawn_gradients(scores, taps.points, number)
            predictions = float(scores.numel() // scores.shape[class_axis(scores)])
            for key, value in taps.squares(gradients, batch_size(batch)).items():
                add_sums(total, key, [value / (2 * PROBES), predictions])
    return {key: value / max(count, 1.0) for key, (value, count) in total.items()}


def _drawn_gradients(
    scores: Tensor, points: Sequence[Tensor], number: int
) -> list[Sequence[Tensor | None]]:
    """Return gradients at ``points`` along random directions of batch ``number``."""
    generator = torch.Generator().manual_seed(number)
    found: list[Sequence[Tensor | None]] = []
    for probe in range(PROBES):
        with torch.enable_grad():
            along = (_drawn_direction(scores, generator) * scores).sum()
        kept = probe < PROBES - 1
        found.append(torch.autograd.grad(along, points, retain_graph=kept, allow_unused=True))
    return found


def _class_scores(output: Any) -> Tensor:
    """Return the first output with classes that a gradient leads to; an error names what to do."""
    found = [scores for scores in scores_in(output) if scores.requires_grad]
    if not found:
        raise ConfigError(
            "sensitivity: metric='fisher' got a model whose output has no classes, or no gradient; "
            "expected scores of shape (N, classes, ...). Use metric='sqnr'"
        )
    return found[0]


def _drawn_direction(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random direction of the scores whose second moment is the Fisher information.

    Signs ``e`` give ``(diag(r) - p r') e``, where ``r`` is the root of the probabilities ``p``.
    Each draw weighs all classes; a drawn label is nearly always the likeliest one.
    """
    axis = class_axis(scores)
    chances = scores.detach().float().softmax(axis)
    signs = torch.randint(0, 2, scores.shape, generator=generator, device="cpu").to(chances) * 2 - 1
    drawn = chances.sqrt() * signs
    return (drawn - chances * drawn.sum(axis, keepdim=True)).to(scores.dtype)


@dataclass
class _Tap:
    """One call of a module: its arguments, its outputs, and points where gradients are taken."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    first: int


class _Taps:
    """Points at the outputs of modules, and what disturbances do there."""

    def __init__(self, disturbances: Collection[Disturbance]) -> None:
        self._by_module: dict[nn.Module, list[Disturbance]] = {}
        for disturbance in disturbances:
            self._by_module.setdefault(disturbance.module, []).append(disturbance)
        self.points: list[Tensor] = []
        self._taps: list[_Tap] = []

    def hooks(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Return what taps every module."""
        return [(module, partial(self._after, module)) for module in self._by_module]

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        outputs = floats_in(output)
        points = [torch.zeros_like(t, requires_grad=True) for t in outputs]
        kept = [t.detach() for t in outputs]
        self._taps.append(_Tap(module, args, kwargs, kept, len(self.points)))
        self.points += points
        waiting = iter(points)
        # The sum is a new tensor, so that code in place does not change the one that is kept.
        return map_tensors(output, lambda t: t + next(waiting) if t.is_floating_point() else t)

    @torch.no_grad()
    def squares(self, gradients: Sequence[Sequence[Tensor | None]], size: int) -> dict[Any, float]:
        """Return for each key the sum of squared products with the gradients, over samples."""
        # One disturbance after the other, so that they need not lie in memory together.
        products: dict[Any, list[Tensor]] = {}
        for tap in self._taps:
            for disturbance in self._by_module[tap.module]:
                moved = floats_in(disturbance.run(tap.args, tap.kwargs))
                for place, value in enumerate(moved[: len(tap.outputs)]):
                    move = value - tap.outputs[place]
                    found = [g[tap.first + place] for g in gradients]
                    new = [_of_samples(g * move, size) for g in found if g is not None]
                    known = products.get(disturbance.key)
                    products[disturbance.key] = _added(known, new)
        return {
            key: sum(float(part.double().square().sum()) for part in parts)
            for key, parts in products.items()
        }


def _added(known: list[Tensor] | None, new: list[Tensor]) -> list[Tensor]:
    """Return sums, probe by probe; products of unlike shapes count by themselves."""
    if not known:
        return new
    if len(known) != len(new) or any(a.shape != b.shape for a, b in zip(known, new, strict=True)):
        return known + new
    return [a + b for a, b in zip(known, new, strict=True)]


def _of_samples(values: Tensor, size: int) -> Tensor:
    """Return the sum of each sample; of everything where the samples cannot be told apart."""
    if values.dim() and size and values.shape[0] % size == 0:
        return values.reshape(size, -1).sum(1)
    return values.sum().reshape(1)
