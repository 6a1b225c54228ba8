"""Weights that oscillate between two codes: how many do, a loss against it, and freezing them.

With few bits, the straight-through gradient moves a weight towards the border of two codes and
then back and forth across it, so the statistics of BatchNorm never converge. Networks with
depthwise convolutions suffer most.

Reference: Nagel et al., Overcoming Oscillations in Quantization-Aware Training (ICML 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.functional import dequantize, quantize
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import Pattern
from torchq.workflow import select_quantizers

__all__ = ["Oscillations", "dampening_loss"]

Patterns = Sequence[Pattern] | Pattern


def _pairs(model: nn.Module, patterns: Patterns) -> Iterator[tuple[str, TensorQuantizer, Tensor]]:
    """Yield path, quantizer and weight of the selected weight quantizers with known ranges."""
    chosen = {id(q): path for path, q in select_quantizers(model, patterns).items()}
    for module in model.modules():
        if isinstance(module, QuantModule):
            for quantizer, weight in module.quantized_weights():
                fixed = quantizer.calibrated and not quantizer.descriptor.dynamic
                if id(quantizer) in chosen and quantizer.quantizing and fixed:
                    yield chosen[id(quantizer)], quantizer, weight


def dampening_loss(model: nn.Module, patterns: Patterns = "*") -> Tensor:
    """Return the squared distance of all weights to their codes, to be added to the loss.

    It pulls each weight to the middle of its code, away from the borders. Clipped weights are not
    pulled. Multiply it by a factor that grows from 0 while training, so that weights can still
    find their codes at the start.

    Args:
        model: a calibrated model.
        patterns: as for :func:`torchq.disabled`; of what they select, weight quantizers count.

    Returns:
        A sum over all elements, 0-d, with a gradient to the weights alone.

    Raises:
        ConfigError: a pattern selects no quantizer, or none of a weight with a known range.

    Reference: section 4.1 of the paper above, equation 8.
    """
    losses = []
    for _, quantizer, weight in _pairs(model, patterns):
        with torch.no_grad():
            target = quantizer.descriptor.granularity.split(quantizer.apply_own(weight))
        losses.append((target - _inside(quantizer, weight)).square().sum())
    if not losses:
        raise ConfigError(
            "dampening_loss: got patterns without a weight quantizer that has a known range; "
            "expected at least one. Run torchq.calibrate first"
        )
    return torch.stack(losses).sum()


def _inside(quantizer: TensorQuantizer, weight: Tensor) -> Tensor:
    """Return the weight between the ends of its range, in the form that its granularity splits."""
    d = quantizer.descriptor
    amin, amax = (None if e is None else e.detach() for e in quantizer.ends_for(weight))
    assert amax is not None
    high = d.granularity.align(amax.to(weight.dtype), weight.shape)
    low = high * (d.format.quant_min / d.format.quant_max)
    if amin is not None:
        low = d.granularity.align(amin.to(weight.dtype), weight.shape)
    return torch.minimum(torch.maximum(d.granularity.split(weight), low), high)


class _Watched:
    """What is known about the codes of one weight.

    Attributes:
        codes: after the last step.
        direction: of the last change of each code, -1 or 1; 0 before there was one.
        frequency: the average of how often a change went back on the one before.
        mean: the average of the codes.
        frozen: where the weight stays at :attr:`kept`.
        kept: the codes of frozen weights.
    """

    NAMES = ("codes", "direction", "frequency", "mean", "frozen", "kept")

    def __init__(self, quantizer: TensorQuantizer, weight: Tensor) -> None:
        self.quantizer, self.weight = quantizer, weight
        self.codes = self.read()
        self.direction, self.frequency = (torch.zeros_like(self.codes) for _ in range(2))
        self.mean, self.kept = self.codes.clone(), self.codes.clone()
        self.frozen = torch.zeros_like(self.codes, dtype=torch.bool)

    def _grid(self) -> tuple[Any, ...]:
        d = self.quantizer.descriptor
        amin, amax = self.quantizer.ends_for(self.weight)
        return amax, d.format, d.granularity, d.block_scale_format, amin

    def read(self) -> Tensor:
        """Return the codes of the weight now."""
        return quantize(self.weight, *self._grid())

    def update(self, momentum: float, freeze_above: float | None) -> None:
        """Take the codes after a step into account, and bring frozen weights back."""
        codes = self.read()
        change = (codes - self.codes).sign()
        is_back = (change != 0) & (change == -self.direction)
        self.frequency.lerp_(is_back.to(self.frequency.dtype), momentum)
        self.mean.lerp_(codes, momentum)
        self.direction = torch.where(change != 0, change, self.direction)
        self.codes = codes
        if freeze_above is not None:
            new = (self.frequency > freeze_above) & ~self.frozen
            self.kept = torch.where(new, self.mean.round(), self.kept)
            self.frozen |= new
        values = dequantize(self.kept, *self._grid()).to(self.weight.dtype)
        self.weight.copy_(torch.where(self.frozen, values, self.weight))


class Oscillations:
    """Watches the codes of weights from step to step, and can freeze those that oscillate.

    A frozen weight stays in the middle of the code that it had on average. Call :meth:`update_`
    after each step of the optimizer.

    Args:
        model: a calibrated model, with weights that are parameters.
        patterns: as for :func:`torchq.disabled`; of what they select, weight quantizers count.
        momentum: of all averages; 0.01 looks back over about a hundred steps.
        freeze_above: freeze a weight whose frequency of oscillation, 0 to 1, is above this. None
            only watches. It may be changed while training: a threshold that falls slowly freezes
            more at the end.

    Raises:
        ConfigError: a pattern selects no quantizer, or none of a weight that can be frozen; or a
            momentum that is not above 0 and at most 1.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> _ = torchq.quantize_(model), torchq.calibrate(model, [torch.ones(1, 2)], progress=False)
        >>> oscillations = torchq.qat.Oscillations(model, freeze_above=0.02)
        >>> oscillations.update_()
        >>> oscillations.share(), oscillations.frozen()
        (0.0, 0.0)

    Reference: section 4.2 of the paper above, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        patterns: Patterns = "*",
        *,
        momentum: float = 0.01,
        freeze_above: float | None = None,
    ) -> None:
        if not 0 < momentum <= 1:
            raise ConfigError(f"Oscillations: got momentum={momentum!r}; expected a number 0 to 1")
        self.momentum, self.freeze_above = momentum, freeze_above
        with torch.no_grad():
            self._watched = {
                path: _Watched(quantizer, weight)
                for path, quantizer, weight in _pairs(model, patterns)
                if isinstance(weight, nn.Parameter)
            }
        if not self._watched:
            raise ConfigError(
                "Oscillations: got patterns without a quantizer of a parameter with a known "
                "range; expected at least one. Run torchq.calibrate first"
            )

    @torch.no_grad()
    def update_(self) -> None:
        """Take the last step into account; frozen weights go back to their codes."""
        for watched in self._watched.values():
            watched.update(self.momentum, self.freeze_above)

    def share(self, above: float = 0.005) -> float:
        """Return the share of weights that oscillate more often than ``above``, 0 to 1.

        The default is that of the paper.
        """
        return self._share([w.frequency > above for w in self._watched.values()])

    def frozen(self) -> float:
        """Return the share of weights that are frozen, 0 to 1."""
        return self._share([watched.frozen for watched in self._watched.values()])

    @staticmethod
    def _share(flags: list[Tensor]) -> float:
        count = sum(flag.numel() for flag in flags)
        return sum(int(flag.sum()) for flag in flags) / count if count else 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """Return what :meth:`load_state_dict` needs to continue a run."""
        return {
            f"{path}.{name}": getattr(watched, name).clone()
            for path, watched in self._watched.items()
            for name in _Watched.NAMES
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from the result of :meth:`state_dict`.

        Raises:
            ConfigError: it is of other weights.
        """
        expected = self.state_dict()
        wrong = sorted(expected.keys() ^ state.keys())
        wrong += [k for k in expected.keys() & state.keys() if expected[k].shape != state[k].shape]
        if wrong:
            raise ConfigError(
                f"Oscillations: got a state with other entries ({', '.join(wrong[:3])}); expected "
                "that of the same model"
            )
        for path, watched in self._watched.items():
            for name in _Watched.NAMES:
                setattr(watched, name, state[f"{path}.{name}"].clone())
