"""An estimate of each layer's cost from gradients: a few backward passes for all layers together.

A layer that is quantized alone moves its output by ``d``. To second order this changes the
divergence of the class probabilities by ``d' F d / 2``, where ``F`` is the Fisher information at
that output. For labels that are drawn from the model's own probabilities, ``F`` is the mean of
``g g'``, with ``g`` the gradient of their log-likelihood. So the cost is the mean of
``(g . d)**2 / 2``. Reference: Martens, New Insights and Perspectives on the Natural Gradient
Method (2020), sections 5 and 9.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.ranking.metrics import class_axis
from torchq.errors import ConfigError
from torchq.graph import tensors_in

__all__ = ["PROBES", "Disturbance", "fisher_sums"]

#: Backward passes for each batch.
PROBES = 4

#: Returns what a module would return under some quantization, given its arguments.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Disturbance:
    """One way to quantize one module.

    Attributes:
        key: what the cost is added to: a group, or a layer with a format.
        module: the module whose output moves.
        run: computes the output that it would have.
    """

    key: Any
    module: nn.Module
    run: Run


def fisher_sums(
    call: Callable[[], Any],
    disturbances: Collection[Disturbance],
    size: int,
    generator: torch.Generator,
    probes: int = PROBES,
) -> dict[Any, list[float]]:
    """Return for each key the sum of the estimates over one batch, and the number of predictions.

    Args:
        call: runs the float model on the batch.
        disturbances: those of one key are taken to happen together.
        size: images or sequences in the batch.
        generator: of the labels that are drawn.
        probes: backward passes.

    Raises:
        ConfigError: The output has no gradient with respect to the layers, or no classes.
    """
    taps = _Taps(disturbances)
    with torch.enable_grad(), taps.hooked():
        output = call()
        scores = _class_scores(output)
    if not taps.points:
        return {}
    found = {d.key: 0.0 for d in disturbances if d.key in taps.keys}
    for number in range(probes):
        likelihood = _drawn_likelihood(scores, generator)
        last = number == probes - 1
        gradients = torch.autograd.grad(
            likelihood, taps.points, retain_graph=not last, allow_unused=True
        )
        for key, total in taps.squares(gradients, size).items():
            found[key] += total / (2 * probes)
    predictions = float(scores.numel() // scores.shape[class_axis(scores)])
    return {key: [value, predictions] for key, value in found.items()}


def _class_scores(output: Any) -> Tensor:
    """Return the largest output with classes.

    Raises:
        ConfigError: There is none that a gradient leads to.
    """
    found = [t for t in tensors_in(output) if t.is_floating_point() and t.dim() >= 2]
    found = [t for t in found if t.requires_grad and t.shape[class_axis(t)] > 1]
    if not found:
        raise ConfigError(
            "sensitivity: metric='fisher' got a model whose output has no classes, or no gradient; "
            "expected scores of shape (N, classes, ...). Use metric='sqnr'"
        )
    return max(found, key=Tensor.numel)


def _drawn_likelihood(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return the log-likelihood of labels that are drawn from the model's own probabilities."""
    axis = class_axis(scores)
    logarithms = scores.float().log_softmax(axis).movedim(axis, -1)
    flat = logarithms.reshape(-1, logarithms.shape[-1])
    chances = flat.detach().exp().cpu()
    labels = torch.multinomial(chances, 1, generator=generator).to(flat.device)
    return flat.gather(1, labels).sum()


class _Taps:
    """Points at the outputs of modules, where gradients are taken and disturbances are known."""

    def __init__(self, disturbances: Collection[Disturbance]) -> None:
        self._by_module: dict[nn.Module, list[Disturbance]] = {}
        for disturbance in disturbances:
            self._by_module.setdefault(disturbance.module, []).append(disturbance)
        self.points: list[Tensor] = []
        self._moves: list[list[tuple[Any, Tensor]]] = []
        self.keys: set[Any] = set()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Tap every module inside a ``with`` block."""
        with ExitStack() as stack:
            for module in self._by_module:
                handle = module.register_forward_hook(self._after, with_kwargs=True)
                stack.callback(handle.remove)
            yield

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        expected = [t for t in _flat(output) if t.is_floating_point()]
        moves: list[list[tuple[Any, Tensor]]] = [[] for _ in expected]
        with torch.no_grad():
            for disturbance in self._by_module[module]:
                moved = [t for t in _flat(disturbance.run(args, kwargs)) if t.is_floating_point()]
                for place, (value, reference) in enumerate(zip(moved, expected, strict=False)):
                    moves[place].append((disturbance.key, value - reference))
                self.keys.add(disturbance.key)
        points = [torch.zeros_like(t, requires_grad=True) for t in expected]
        self.points += points
        self._moves += moves
        waiting = iter(points)
        return _mapped(output, lambda t: t + next(waiting) if t.is_floating_point() else t)

    def squares(self, gradients: Sequence[Tensor | None], size: int) -> dict[Any, float]:
        """Return for each key the sum over samples of the squared product with the gradient."""
        products: dict[Any, Tensor] = {}
        for gradient, moves in zip(gradients, self._moves, strict=True):
            if gradient is None:
                continue
            for key, move in moves:
                product = _of_samples(gradient * move, size)
                known = products.get(key)
                same = known is not None and known.shape == product.shape
                products[key] = known + product if known is not None and same else product
        return {key: float(product.double().square().sum()) for key, product in products.items()}


def _of_samples(values: Tensor, size: int) -> Tensor:
    """Return the sum of each sample; of everything where the samples cannot be told apart."""
    if values.dim() and size and values.shape[0] % size == 0:
        return values.reshape(size, -1).sum(1)
    return values.sum().reshape(1)


def _flat(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _flat(item)]
    return []


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with its tensors changed, in the order of :func:`_flat`."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [_mapped(item, change) for item in value]
        is_named = isinstance(value, tuple) and hasattr(value, "_fields")
        return type(value)(*items) if is_named else type(value)(items)
    return value
