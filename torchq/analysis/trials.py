"""What cures do to the outputs of a model, measured on the batches at hand.

The model itself stays as it is. Wider codes and float for an input are tried in its place, for a
run. Even channels change weights, and ranges with them: they are tried on a copy of the model, made
float, equalized, quantized as its plan says and calibrated. To calibrate anew may help by itself,
so that a second copy, calibrated alike and not equalized, tells what even channels add.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.checks import (
    BYTE,
    LEAST_GAIN,
    Evened,
    Healing,
    Observation,
    Ruling,
)
from torchq.analysis.layers import passing
from torchq.analysis.outputs import Sqnr, Sums, add_sums, batch_size
from torchq.errors import TorchqError
from torchq.graph import Forward, call_model
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.tensor_quantizer import Delegate
from torchq.swap import apply_, plan_of, restore_
from torchq.utils import RandomState, copy_module, device_of, random_kept, untouched
from torchq.workflow import calibrate, quantizers
from torchq.workflow.equalization import equalize_, equalize_depthwise_, evened_layers

#: Inputs that one channel rules which are healed, the worst ones.
HEALED = 3
#: Batches that copies are calibrated on and compared on, and samples from which on they are enough.
_BATCHES, _ENOUGH = 4, 64
#: The factor by which the estimated share of a layer's noise may be off. On a MobileNetV2 depthwise
#: layers have a quarter of it, and even channels gain as if it were a third.
_UNSURE = 2.0
#: Names of functions of ``torchq.ptq`` -> what each does to a model that is not calibrated.
_EVENING: Mapping[str, Callable[[nn.Module, Sequence[Any]], object]] = {
    "equalize_depthwise_": partial(equalize_depthwise_, progress=False),
    "equalize_": lambda model, batches: equalize_(model, batches[0]),
}
DEPTHWISE, BETWEEN_LAYERS = _EVENING


#: For each batch what :meth:`Sqnr.sums` returns.
_Noise = list[list[float]]


@dataclass(frozen=True)
class _Trial:
    """The noise of a model, of a copy that is calibrated anew, and of one with even channels."""

    now: _Noise
    anew: _Noise
    evened: _Noise

    def on(self, function: str, count: int) -> Evened:
        """Return the figures of the first batches, for the function that was tried."""
        noises = (self.now, self.anew, self.evened)
        return Evened(function, *(_decibels(noise[:count]) for noise in noises))


def _few(batches: Sequence[Any]) -> list[Any]:
    """Return the first batches, as many as a trial needs."""
    chosen: list[Any] = []
    count = 0
    for batch in batches[:_BATCHES]:
        if count < _ENOUGH:
            chosen.append(batch)
        count += batch_size(batch)
    return chosen


def _decibels(noise: _Noise) -> float:
    """Return the ratio of signal to noise of some batches together."""
    total = Sums()
    for sums in noise:
        add_sums(total, "noise", sums)
    return Sqnr().value(total["noise"])


class Trials:
    """Cures that are tried where a check or the outputs ask for them.

    Args:
        model: quantized and calibrated; left unchanged.
        batches: what it is run on.
        forward: called as ``forward(model, batch)`` in place of the model.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], forward: Forward | None
    ) -> None:
        self._model = model
        self._batches = _few(batches)
        self._run = partial(call_model, forward=forward, device=device_of(model))
        # The lines that are advised call the model itself.
        self._may_be_evened = forward is None and not _is_fitted(model)
        self._layers: dict[str, tuple[str, ...]] = {}
        self._trials: dict[str, _Trial | None] = {}

    @property
    def tried(self) -> tuple[str, ...]:
        """The functions that copies were made for."""
        return tuple(self._trials)

    # --- inputs that one channel rules ----------------------------------------------------------

    def healings(self, rulings: Sequence[Ruling]) -> dict[str, Healing]:
        """Measure what heals inputs that one channel rules: 16 bits, float, even channels.

        The worst few alone, on the first batch: each takes two runs. Even channels are tried once
        for all of them.
        """
        first = self._batches[0]
        by_path = quantizers(self._model)
        worst = rulings[:HEALED]
        found: dict[str, tuple[float, float]] = {}
        with random_kept(), untouched(self._model):
            start = RandomState.now()
            with passing(self._model):
                exact = self._run(self._model, first)

            def measured() -> float:
                start.restore()
                out = self._run(self._model, first)
                return Sqnr().value(Sqnr().sums(out, exact, first))

            now = measured()
            for ruling in worst:
                quantizer = by_path[ruling.path]
                with delegated(quantizer, partial(_with_16_bits, _wider(quantizer))):
                    wide = measured()
                with delegated(quantizer, _unchanged):
                    found[ruling.path] = wide, measured()
        return {
            path: Healing(now, wide, as_float, self._evened_input(path))
            for path, (wide, as_float) in found.items()
        }

    def _evened_input(self, path: str) -> Evened | None:
        """Return what evens the channels that a quantizer reads, and does best at the outputs."""
        layer = path.rpartition(".")[0]
        tried = [
            trial.on(function, 1)
            for function in _EVENING
            if layer in self._layers_of(function)
            and (trial := self._trial_of(function)) is not None
        ]
        return max(tried, key=lambda evened: evened.evened, default=None)

    # --- what depthwise layers read --------------------------------------------------------------

    def even_inputs(
        self, seen: Observation, shares: Mapping[str, float]
    ) -> Evened | None:
        """Measure what even channels of what depthwise layers read do to the outputs.

        Args:
            seen: what inputs hold.
            shares: of the damage that layers do; where those of depthwise layers leave nothing to
                gain, nothing is tried.
        """
        if self._most_gained(seen, shares) < LEAST_GAIN:
            return None
        trial = self._trial_of(DEPTHWISE)
        return None if trial is None else trial.on(DEPTHWISE, len(self._batches))

    def _most_gained(self, seen: Observation, shares: Mapping[str, float]) -> float:
        """Return how many dB the outputs may come nearer to float: all noise is that of inputs."""
        rest = 1.0
        for name in self._layers_of(DEPTHWISE):
            layer: Any = self._model.get_submodule(name)
            quantizer = getattr(layer, "input_quantizer", None)
            largest = seen.channels.get(id(quantizer))
            if largest is None or not bool((largest > 0).any()):
                continue
            sizes = largest[largest > 0].double()
            # A channel that grows n-fold has 1 / n of the noise.
            kept = float((sizes / sizes.max()).square().mean())
            rest -= _UNSURE * shares.get(name, 0.0) * (1 - kept)
        return -10 * math.log10(max(rest, 1e-9))

    # --- layers in float --------------------------------------------------------------------------

    def gain_in_float(self, names: Sequence[str]) -> float:
        """Return by how many dB the outputs come nearer to float with some layers in float.

        It is NaN for outputs that cannot be compared.
        """
        model = self._model
        # Paths are no patterns: that of the root is empty.
        owned = {
            path: quantizer
            for path, quantizer in quantizers(model).items()
            if path.rpartition(".")[0] in names
        }
        with random_kept():
            now = _decibels(self._noise_of(model))
            with switched_off(owned.values()):
                return _decibels(self._noise_of(model)) - now

    # --- copies -----------------------------------------------------------------------------------

    def _layers_of(self, function: str) -> tuple[str, ...]:
        """Return the paths of the layers whose inputs a function makes even."""
        if not self._may_be_evened:
            return ()
        if function not in self._layers:
            depthwise = function == DEPTHWISE
            try:
                with random_kept():
                    layers = evened_layers(
                        self._model, self._batches[0], depthwise=depthwise
                    )
            except TorchqError:
                layers = ()
            self._layers[function] = layers
        return self._layers[function]

    def _trial_of(self, function: str) -> _Trial | None:
        """Return what a function does to the outputs; None where it cannot be called."""
        if function not in self._trials:
            anew = next((t.anew for t in self._trials.values() if t is not None), None)
            with random_kept(), warnings.catch_warnings():
                # What they say of the model was said when it was calibrated.
                warnings.simplefilter("ignore")
                try:
                    self._trials[function] = self._tried(function, anew)
                except TorchqError:
                    self._trials[function] = None
        return self._trials[function]

    def _tried(self, function: str, anew: _Noise | None) -> _Trial:
        evened = self._noise_of(self._calibrated_copy(_EVENING[function]))
        if anew is None:
            anew = self._noise_of(self._calibrated_copy(None))
        return _Trial(self._noise_of(self._model), anew, evened)

    def _calibrated_copy(
        self, evening: Callable[[nn.Module, Sequence[Any]], object] | None
    ) -> nn.Module:
        """Return a copy of the model that is calibrated anew, perhaps with even channels."""
        copy = copy_module(self._model)
        plan = plan_of(copy)
        restore_(copy)
        apply_(copy, plan)
        if evening is not None:
            evening(copy, self._batches)
        calibrate(copy, self._batches, on_unseen="dynamic", progress=False)
        return copy

    @torch.no_grad()
    def _noise_of(self, model: nn.Module) -> _Noise:
        """Return for each batch the noise of a model beside itself in float."""
        active = [q for q in quantizers(model).values() if q.quantizing]
        noise = []
        with untouched(model):
            for batch in self._batches:
                start = RandomState.now()
                with switched_off(active):
                    exact = self._run(model, batch)
                start.restore()
                out = self._run(model, batch)
                noise.append(Sqnr().sums(out, exact, batch))
        return noise


def _is_fitted(model: nn.Module) -> bool:
    """Return True for what a new calibration would lose: learned ranges, rounded weights."""
    learned = any(q.descriptor.learn_amax for q in quantizers(model).values())
    return learned or has_rounded_weights(model)


@torch.no_grad()
def has_rounded_weights(model: nn.Module) -> bool:
    """Return True if weights of a layer lie on their grid, as ``gptq_`` leaves them."""
    return any(
        quantizer.quantizing and torch.equal(quantizer(weight), weight)
        for module in model.modules()
        if isinstance(module, QuantModule)
        for quantizer, weight in module.quantized_weights()
    )


def _wider(quantizer: TensorQuantizer) -> TensorQuantizer:
    """Return a quantizer of the same range with codes of 16 bits."""
    same = quantizer.descriptor.replace(amax=None, amin=None, learn_amax=False)
    wide = TensorQuantizer(
        same.replace(num_bits=2 * BYTE), device=quantizer.amax.device
    )
    wide.range = quantizer.range
    return wide


def _with_16_bits(wide: TensorQuantizer, x: Tensor, _: TensorQuantizer) -> Tensor:
    return wide.apply_own(x)


def _unchanged(x: Tensor, _: TensorQuantizer) -> Tensor:
    return x


@contextmanager
def delegated(quantizer: TensorQuantizer, function: Delegate) -> Iterator[None]:
    """Let a function quantize in place of a quantizer, inside the ``with`` block."""
    before = quantizer.delegate
    quantizer.delegate = function
    try:
        yield
    finally:
        quantizer.delegate = before
