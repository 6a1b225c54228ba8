"""Ranges of activations, learned end to end before weights are rounded.

The gradient of a range is that of LSQ (Esser et al., Learned Step Size Quantization, ICLR 2020,
section 2.1). Factors of channels are those of cross-layer equalization (Nagel et al. 2019,
section 4.1), here for the activations and over whole residual streams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError, ConfigError, QuantizationError, TorchqError
from torchq.formats import PerTensor
from torchq.graph import is_torch_leaf, record, tensors_in
from torchq.nn import QuantModule, TensorQuantizer
from torchq.ptq.adaround.block_state import BlockState, learnable_ranges
from torchq.ptq.adaround.finish import WholeModel, layer_biases, output_distance
from torchq.ptq.adaround.learned_block import LearnedBlock, LearnedRange
from torchq.ptq.adaround.reconstruction import BlockData, Settings, learn, mean_error
from torchq.ptq.blockwise import Block, Replay, RunOptions, TensorStore
from torchq.ptq.channels import LAYERS, largest_change, tensors_restored_on_error
from torchq.ptq.learned_ranges.channel_classes import ChannelClasses, find_classes
from torchq.ptq.learned_ranges.channel_factors import (
    ChannelFactors,
    FactoredRange,
    start_at_power_,
)
from torchq.ptq.modes import quantizers_off
from torchq.ptq.ranks import rank_in
from torchq.ptq.reports import report_text
from torchq.ptq.smoothing.factors import model_outputs, relative_error
from torchq.utils import NotebookText, device_of, evaluating
from torchq.workflow import quantizers, weight_quantizers

__all__ = ["LearnedRangesReport", "learn_ranges_"]

# Rows of a batch in one step.
_ROWS = 64
# The largest relative change of a float32 output by factors.
_TOLERANCE = 1e-4
# Learning rates of Adam; they fall to 0 by a cosine.
_RATE_RANGES, _RATE_FACTORS, _RATE_BIASES = 5e-3, 1e-2, 1e-3


@dataclass(frozen=True)
class LearnedRangesReport(NotebookText):
    """The result of :func:`learn_ranges_`.

    Attributes:
        ranges: path of each quantizer whose range was learned -> its amax before and after.
        channels: how many channels got a factor; those that layers make or read together count
            once.
        error: of the output of the model with float weights, before and after: the squared error
            over the variance, and for class scores the divergence of the probabilities in nats
            added.
        batches: the number of batches that were read.
    """

    ranges: Mapping[str, tuple[float, float]]
    channels: int
    error: tuple[float, float]
    batches: int

    def __str__(self) -> str:
        rows = [(name, "{:.4g} -> {:.4g}".format(*ends)) for name, ends in self.ranges.items()]
        error = "error of the output {:.3g} -> {:.3g}".format(*self.error)
        last = f"{self.channels} channels with factors, {error}, {self.batches} batches"
        return report_text(("quantizer", "amax"), rows, {}, last)


def learn_ranges_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    steps: int = 300,
    factors: bool = True,
    seed: int = 0,
    run: RunOptions | None = None,
    progress: bool = True,
) -> LearnedRangesReport:
    """Learn the ranges of activations for the output of the float model, in place.

    Call it after :func:`torchq.calibrate` and before :func:`gptq_` or :func:`adaround_`, which
    round the weights; no labels are needed. Weights stay float while ranges are learned. With
    ``factors`` the channels of activations are also divided by factors, which their readers
    multiply by again: layers take them, over ReLU, pooling, additions, slices and zero padding, so
    that channels of different size fill one range alike. The float output stays the same, which is
    verified on the first batch, and nothing is added to the model. Biases are learned along and
    given back, because rounding corrects them anew.

    A call that fails or is interrupted changes nothing, and so does one that finds nothing better
    on the batches.

    Args:
        model: a calibrated model whose weights are not rounded yet.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            1,024 images are enough, and copies that are mirrored or moved help. All are kept in
            memory.
        steps: training steps, each on 64 rows of a batch.
        factors: learn factors of channels too.
        seed: of the random choices. The result depends on it and on the batches alone.
        run: how the model is run; see :class:`RunOptions`. With ``run.group`` the gradients of all
            processes are averaged, and each has its own batches.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no range can be learned, or an argument is invalid.
        CalibrationError: there is no batch, or NaN or infinity appears.
        QuantizationError: the float output changed with the factors, relatively by more than 1e-4
            for float32, and by more than 8 units in the last place for dtypes of 16 bits.

    Example:
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
        ... )
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(4, 4))
        >>> batches = [torch.rand(64, 8)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> report = torchq.ptq.learn_ranges_(model, batches, steps=2, progress=False)
        >>> list(report.ranges)
        ['0.input_quantizer', '2.input_quantizer']
    """
    run = run or RunOptions()
    _check(steps, run)
    with torch.no_grad(), evaluating(model), TensorStore(run.memory_limit) as store:
        replay = Replay(model, batches, run, store, "learn_ranges_")
        learnable = learnable_ranges(model, model)
        if not learnable:
            raise ConfigError(
                "learn_ranges_: got no range that can be learned; expected quantizers of "
                "activations with fixed integer ranges. Run torchq.calibrate first"
            )
        module = WholeModel(replay)
        classes = ChannelClasses(0, {})
        with quantizers_off(model):
            data = _float_data(replay, module)
            if factors:
                classes = _classes(model, replay.batches[0], learnable)
        settings = Settings(
            *(steps, _ROWS, 0.0, run.group),
            loss=output_distance,
            where="learn_ranges_",
            progress=progress,
        )
        return _Work(model, replay, module, data, settings, run).learn(learnable, classes, seed)


def _check(steps: int, run: RunOptions) -> None:
    """Raise an error for an argument that is out of range."""
    if steps < 1:
        raise ConfigError(f"learn_ranges_: got steps={steps}; expected at least 1")
    if run.weights is not None:
        raise ConfigError(
            "learn_ranges_: got run.weights; expected all weights in memory, because ranges are "
            "learned through the whole model"
        )


def _float_data(replay: Replay, module: WholeModel) -> BlockData:
    """Return the batches with the outputs of the model as it is."""
    store = replay.store
    for index, batch in enumerate(replay.batches):
        out = module(batch)
        if any(not tensor.numel() for tensor in tensors_in(out)):
            raise CalibrationError(
                "learn_ranges_: got batches without rows; expected at least one row"
            )
        store.put(("float output", index), out)

    def inputs(index: int) -> Any:
        return (replay.batches[index],), {}

    def target(index: int) -> Any:
        return store.get(("float output", index))

    return BlockData(len(replay.batches), inputs, inputs, target)


def _classes(model: nn.Module, batch: Any, learnable: list[TensorQuantizer]) -> ChannelClasses:
    """Return the channels that can take factors."""
    flow = record(model, batch, lambda m: is_torch_leaf(m) or isinstance(m, QuantModule))
    owners: dict[int, int] = {}
    for module in model.modules():
        for child in module.children():
            owners[id(child)] = owners.get(id(child), 0) + 1
    suitable = {
        id(q)
        for q in learnable
        if owners.get(id(q)) == 1
        and isinstance(q.descriptor.granularity, PerTensor)
        and q.pre_quant_scale is None
    }
    weights = weight_quantizers(model)
    wanted, fixed = [], []
    for layer in model.modules():
        if not isinstance(layer, LAYERS):
            continue
        if id(getattr(layer, "input_quantizer", None)) in suitable:
            wanted.append(layer)
        others = [m for m in layer.children() if isinstance(m, TensorQuantizer)]
        if any(m.calibrated and id(m) not in weights | suitable for m in others):
            fixed.append(layer)
    return find_classes(model, flow, wanted, fixed)


class _Learned(LearnedBlock):
    """The ranges, factors and biases of a whole model."""

    def __init__(
        self,
        block: Block,
        ranges: list[LearnedRange],
        factors: ChannelFactors,
        biases: list[nn.Parameter],
    ) -> None:
        super().__init__(block, {}, [], 0.0, torch.Generator(), biases)
        self.ranges, self._factors = ranges, factors

    def rates(self, rate: float) -> list[tuple[list[Tensor], float]]:
        """Return what is learned, with learning rates."""
        logs = [log for learned in self.ranges for log in learned.logs]
        return [
            (logs, _RATE_RANGES),
            ([self._factors.log], _RATE_FACTORS),
            (list(self.biases), _RATE_BIASES),
        ]

    def error(self, module: nn.Module, data: BlockData, settings: Settings) -> float:
        """Return the error of ``module`` with what is learned, over all batches."""
        with self._learned_forwards(lambda soft: soft.value()):
            return mean_error(module, data, settings)


class _Work:
    """The course of one call."""

    def __init__(
        self,
        model: nn.Module,
        replay: Replay,
        module: WholeModel,
        data: BlockData,
        settings: Settings,
        run: RunOptions,
    ) -> None:
        self.model, self.replay, self.module = model, replay, module
        self.data, self.settings, self.run = data, settings, run

    def learn(
        self, learnable: list[TensorQuantizer], classes: ChannelClasses, seed: int
    ) -> LearnedRangesReport:
        """Learn, and change the model if that is better."""
        model, group = self.model, self.settings.group
        block, biases = Block("", self.module, {}), layer_biases(model)
        state = BlockState(block, learnable, biases)
        names = {id(q): name for name, q in quantizers(model).items()}
        old = {names[id(q)]: q.ends()[-1].max().item() for q in learnable}
        factors = ChannelFactors(classes, device_of(model))
        ranges = _ranges(learnable, factors)
        learned = _Learned(block, list(ranges.values()), factors, biases)
        generator = torch.Generator().manual_seed(seed + 1_000_000_007 * rank_in(group))
        with _all_restored_on_error(model):
            with quantizers_off(model, weights_only=True):
                before = self._first_error()
                with_factors = {
                    key: one for key, one in ranges.items() if isinstance(one, FactoredRange)
                }
                with quantizers_off(model):
                    batch = self.replay.batches[0]
                    start_at_power_(with_factors, factors, self.module, batch, group)
                learn("the model", learned, self.data, self.settings, generator)
                after = learned.error(self.module, self.data, self.settings)
            state.restore()
            if after < before:
                self._apply(learned, factors)
            else:
                after = before
        new = {names[id(q)]: q.ends()[-1].max().item() for q in learnable}
        changed = {name: (old[name], new[name]) for name in old}
        count = classes.count if after < before else 0
        return LearnedRangesReport(changed, count, (before, after), len(self.replay.batches))

    def _first_error(self) -> float:
        """Return the error of the output with the calibrated ranges."""
        try:
            error = mean_error(self.module, self.data, self.settings)
        except (RuntimeError, ValueError) as problem:
            if isinstance(problem, TorchqError):
                raise
            raise ConfigError(
                f"learn_ranges_: the outputs of the quantized and of the float model cannot be "
                f"compared ({problem}); expected tensors of one shape. Pass run=RunOptions("
                "forward=...) that returns what comes before, such as boxes before they are chosen"
            ) from problem
        if not math.isfinite(error):
            raise CalibrationError(
                "learn_ranges_: got NaN or infinite outputs; expected finite ones. Check the "
                "batches, and that the output is a tensor of floats"
            )
        return error

    def _apply(self, learned: LearnedBlock, factors: ChannelFactors) -> None:
        """Write ranges and factors, and verify the float output."""
        batch = self.replay.batches[0]
        with quantizers_off(self.model):
            expected = model_outputs(self.model, batch, self.run)
            factors.fold_()
            found = model_outputs(self.model, batch, self.run)
        error = relative_error(found, expected, self.settings.group)
        dtypes = {layer.module.weight.dtype for layer in factors.classes.layers.values()}
        most = max((largest_change(_TOLERANCE, dtype) for dtype in dtypes), default=_TOLERANCE)
        if not error <= most:
            raise QuantizationError(
                f"learn_ranges_: the float output changed by {error:.1e}, relative; expected at "
                f"most {most:.1e}. The model is as before. Pass factors=False"
            )
        for one in learned.ranges:
            one.apply_()


def _ranges(learnable: list[TensorQuantizer], factors: ChannelFactors) -> dict[int, LearnedRange]:
    """Return what is learned of each quantizer, by its id."""
    found: dict[int, LearnedRange] = {
        id(q): LearnedRange(q, 0.0, torch.Generator()) for q in learnable
    }
    for layer in factors.classes.layers.values():
        quantizer: Any = getattr(layer.module, "input_quantizer", None)
        if id(quantizer) in found and set(layer.reads) != {-1}:
            found[id(quantizer)] = FactoredRange(layer, quantizer, factors)
    return found


@contextmanager
def _all_restored_on_error(model: nn.Module) -> Iterator[None]:
    """Bring weights, biases and ranges back if anything ends the block early."""
    known = [q for q in quantizers(model).values() if q.calibrated]
    ends = [(q, tuple(end.clone() for end in q.ends())) for q in known]
    layers = [m for m in model.modules() if isinstance(m, LAYERS)]
    with tensors_restored_on_error(layers):
        try:
            yield
        except BaseException:
            for quantizer, saved in ends:
                quantizer.set_ends(saved)
            raise
