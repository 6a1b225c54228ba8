"""GPTQ block by block: every layer is rounded for the inputs that the quantized model gives it.

References: Frantar et al., GPTQ (ICLR 2023); for the asymmetric target, Li et al., GPTAQ (2025);
for the bias, Nagel et al., Data-Free Quantization (ICCV 2019), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.nn.correction import forget_corrections
from torchq.ptq.layers import (
    check_finite,
    check_on_grid,
    find_layers,
    grid_of,
    own_tensors,
    report_text,
    weight_quantizer,
)
from torchq.ptq.replay import Block, Replay
from torchq.ptq.rounding import (
    Elimination,
    damped_,
    quadratic_error,
    ridge_regression,
    round_groups_,
    round_with_best_ranges,
)
from torchq.utils import Pattern, evaluating, undone_on_error
from torchq.workflow.layer_matrices import (
    input_matrix,
    output_matrix,
    weight_from_matrix,
    weight_matrix,
)

# The pull of the regression towards the float weights, as a fraction of the mean diagonal. With few
# samples for each input it is larger: what cancels their errors by chance does not on others.
_RIDGE, _RIDGE_OF_FEW = 0.1, 3.0
# The inputs for each sample that moments bear without more damping than asked for.
_FEW = 0.05

Target = Literal["weight", "layer", "block"]
_TARGETS = ("weight", "layer", "block")


@dataclass(frozen=True)
class GPTQLayer:
    """What happened to one layer.

    Attributes:
        error_before: the power of the error of its output with weights rounded to nearest, over
            the variance of the output.
        error_after: the same with the new weights, bias and ranges.
        damping: the fraction of the mean diagonal that was added to the diagonal.
        repairs_shortcut: True if its target holds the error of a shortcut.
    """

    error_before: float
    error_after: float
    damping: float
    repairs_shortcut: bool


@dataclass(frozen=True)
class GPTQReport:
    """The result of :func:`gptq_`.

    Attributes:
        layers: path of each layer that was rounded, in the order of the work -> what happened.
        skipped: path of each quantized layer that was left alone -> the reason.
        batches: the number of batches that were read.
    """

    layers: Mapping[str, GPTQLayer]
    skipped: Mapping[str, str]
    batches: int

    def __str__(self) -> str:
        rows = []
        for name, layer in self.layers.items():
            notes = ["repairs a shortcut"] if layer.repairs_shortcut else []
            notes += [f"damping {layer.damping:g}"]
            error = f"{layer.error_before:.3%} -> {layer.error_after:.3%}"
            rows.append((name, error, ", ".join(notes)))
        header = ("layer", "error of the output, relative", "notes")
        last = f"{len(self.layers)} layers from {self.batches} batches"
        return report_text(header, rows, self.skipped, last)


def gptq_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: Target = "block",
    damping: float = 0.01,
    refine: bool = True,
    block: Pattern | Sequence[Pattern] | None = None,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> GPTQReport:
    """Round the weights of Linear and Conv layers for the least error of their outputs, in place.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`; no
    labels are needed. Afterwards the weights are values of the quantizers' grids, so saving,
    exporting and deploying see exactly these codes. The published algorithm is
    ``gptq_(..., target="weight", refine=False)``.

    Layers are treated one block after the other, in running order, on inputs from the quantized
    blocks before. A layer is changed as a whole or not at all; a call that fails or is interrupted
    leaves the layers that were finished as they are, with a warning that names their number.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            A few hundred images are enough. All are kept in memory.
        target: ``"weight"`` keeps the output of the float weights on the quantized inputs.
            ``"layer"`` wants the output of the float layer on the float inputs, so that the layer
            makes up for the rounding of its inputs: ridge regression gives the weights that are
            rounded, moments are centred, and the bias follows in closed form. ``"block"`` wants
            the same, and a layer whose output is added to a shortcut also makes up for the error
            of the shortcut.
        damping: the fraction of the mean diagonal of the Hessian that is added to the diagonal,
            > 0. Where the sum is not positive definite, it grows tenfold; the report has it. Unless
            the target is ``"weight"``, it grows for layers with fewer than 20 samples for each
            input, as moments of few samples say little about others.
        refine: search the ranges of the weights for the least error of the output, and improve
            the rounding by coordinate descent. Without it the ranges are those of calibration.
        block: patterns of the modules that are blocks; None finds them in the structure.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no layer can be treated, an input is not calibrated, or an argument is
            invalid.
        CalibrationError: there is no batch, or a layer sees NaN or infinity.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(64, 8)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> list(torchq.ptq.gptq_(model, batches, progress=False).layers)
        ['0', '1']
    """
    if target not in _TARGETS:
        raise ConfigError(f"gptq_: got target={target!r}; expected one of {', '.join(_TARGETS)}")
    if not 0 < damping < float("inf"):
        raise ConfigError(f"gptq_: got damping={damping}; expected a number > 0")
    found = find_layers("gptq_", model)
    with torch.no_grad(), evaluating(model):
        replay = Replay("gptq_", model, batches, num_batches, forward)
        rounding = BlockRounding(replay, target, damping, refine)

        def treat(number: int, one: Block) -> None:
            rounding.treat(number, one)
            replay.finish(number, "quantized")

        skipped = replay.treat(found, block, treat, rounding.done, progress)
    return GPTQReport(rounding.done, skipped, len(replay.batches))


class BlockRounding:
    """Rounds the layers of one block after the other.

    ``done`` holds what happened to each, ``wanted`` the matrices that the last block rounded.
    """

    def __init__(
        self, replay: Replay, target: Target = "block", damping: float = 0.01, refine: bool = True
    ) -> None:
        self.replay, self.target, self.damping, self.refine = replay, target, damping, refine
        self.done: dict[str, GPTQLayer] = {}
        self.wanted: dict[str, Tensor] = {}

    def treat(self, number: int, block: Block) -> None:
        """Round the layers of block ``number``; all blocks before it are finished."""
        self.wanted = {}
        targets, repairing = self._float_outputs(number, list(block.layers))
        for name, layer in block.layers.items():
            repairs, moments = name in repairing, Moments()
            until: Any = "shortcuts" if repairs else "inputs"
            for index in range(len(self.replay.batches)):
                got = self.replay.run(number, index, "quantized", [name], until=until)
                x = input_matrix(layer, layer.input_quantizer(got.inputs.pop(name)))
                target: Any = targets.pop((name, index), None)
                if name in got.shortcuts:
                    target = target - got.shortcuts[name]
                moments.add(x, None if target is None else output_matrix(layer, target))
            self.done[name], self.wanted[name] = self._round_(name, layer, moments, repairs)

    def _float_outputs(
        self, number: int, names: list[str]
    ) -> tuple[dict[tuple[str, int], Tensor], set[str]]:
        """Return the targets of layers by batch, and the layers that are added to a shortcut."""
        found: dict[tuple[str, int], Tensor] = {}
        repairing: set[str] = set()
        for index in range(0 if self.target == "weight" else len(self.replay.batches)):
            got = self.replay.run(number, index, "float", names)
            shortcuts = got.shortcuts if self.target == "block" else {}
            for name, out in got.outputs.items():
                found[name, index] = out + shortcuts[name] if name in shortcuts else out
            repairing |= shortcuts.keys()
        return found, repairing

    def _round_(
        self, name: str, layer: Any, moments: Moments, repairs_shortcut: bool
    ) -> tuple[GPTQLayer, Tensor]:
        """Round the weight of ``layer`` in place; change its bias and ranges with it, or nothing.

        Returned is what happened, and the weight matrix that was rounded.
        """
        fits_bias = layer.bias is not None and self.target != "weight"
        moments.finish(centred=fits_bias)
        w0, grid, m = weight_matrix(layer, layer.weight.detach()), grid_of(layer), moments
        variance = m.variance(w0)
        check_finite(f"gptq_: {name}", m.count, m.xx, m.tx, m.tt, variance)
        scarcity = m.xx.shape[2] / m.count

        def error(weight: Tensor, bias: Tensor | None) -> float:
            bias = None if bias is None else bias.view(len(w0), -1)
            return float(m.power(w0, weight, bias).sum()) / max(float(variance), 1e-30)

        old_bias = None if layer.bias is None else layer.bias.detach()
        before = error(grid.nearest(w0.to(m.xx.dtype)), old_bias)
        rounded = m.wanted(w0, max(_RIDGE, _RIDGE_OF_FEW * scarcity))
        wanted, diagonals = rounded.clone(), m.xx.diagonal(dim1=1, dim2=2).clone()
        published = self.target == "weight"
        least = self.damping if published else max(self.damping, scarcity - _FEW)
        quantizer = weight_quantizer(layer)
        with undone_on_error(quantizer, written=own_tensors([quantizer])):
            used = self._round_with_ranges_(layer, rounded, m.xx, least)
            weight = weight_from_matrix(layer, rounded).to(layer.weight.dtype)
            check_on_grid("gptq_", name, layer, weight)
            m.xx.diagonal(dim1=1, dim2=2).copy_(diagonals)
            bias = (
                m.bias(rounded).to(old_bias.dtype) if fits_bias and old_bias is not None else None
            )
            after = error(weight_matrix(layer, weight), old_bias if bias is None else bias)
        layer.weight.copy_(weight)
        forget_corrections(layer)  # They were fitted to the weight before.
        if bias is not None:
            layer.bias.copy_(bias)
        return GPTQLayer(before, after, used, repairs_shortcut), wanted

    def _round_with_ranges_(self, layer: Any, wanted: Tensor, h: Tensor, damping: float) -> float:
        """Round a weight matrix in place, and set the ranges that go with it.

        Returns the damping, which is added to ``h``.
        """
        found = [damped_(matrix, damping, Elimination.of) for matrix in h]
        solved, used = [one for one, _ in found], max(used for _, used in found)
        quantizer = weight_quantizer(layer)
        if self.refine:
            rounded, amax = round_with_best_ranges(layer, wanted, h, solved)
            wanted.copy_(rounded)
            quantizer.set_amax(amax)
            return used
        if not quantizer.calibrated:
            quantizer.calibrate_on(weight_from_matrix(layer, wanted).to(layer.weight.dtype))
        round_groups_(wanted, solved, grid_of(layer))
        return used


class Moments:
    """Sums over samples of inputs x, targets t and their products; means after :meth:`finish`.

    The products of one batch are in float32, their sums in float64. The first dimension counts
    groups; without targets t, tx and tt are None.
    """

    x: Tensor  # (groups, inputs)
    xx: Tensor  # x x^T, (groups, inputs, inputs)
    t: Tensor | None  # (groups, outputs)
    tt: Tensor | None  # t^2, (groups, outputs)
    tx: Tensor | None  # t x^T, (groups, outputs, inputs)

    def __init__(self) -> None:
        self.count, self.centred = 0, False
        self._sums: dict[str, Tensor] = {}

    def add(self, x: Tensor, t: Tensor | None = None) -> None:
        """Add samples ``x``, (groups, inputs, samples), and their targets in every call or none."""
        x = x.float()
        parts = {"x": x.sum(2, dtype=torch.float64), "xx": x @ x.mT}
        if t is not None:
            t = t.float()
            parts["t"] = t.sum(2, dtype=torch.float64)
            parts |= {"tt": t.square().sum(2), "tx": t @ x.mT}
        for name, part in parts.items():
            if name in self._sums:
                self._sums[name] += part
            else:
                self._sums[name] = part.double()
        self.count += x.shape[2]

    def finish(self, *, centred: bool) -> None:
        """Turn sums into means; if ``centred``, those of products about the means."""
        means = {name: total.div_(max(self.count, 1)) for name, total in self._sums.items()}
        self._sums, self.centred = {}, centred
        self.x, self.xx = means["x"], means["xx"]
        self.t, self.tt, self.tx = (means.get(name) for name in ("t", "tt", "tx"))
        if not centred:
            return
        self.xx -= self.x.unsqueeze(2) * self.x.unsqueeze(1)
        if self.t is not None and self.tx is not None and self.tt is not None:
            self.tx -= self.t.unsqueeze(2) * self.x.unsqueeze(1)
            self.tt -= self.t.square()

    def mean(self, weight: Tensor) -> Tensor:
        """Return the mean output of a weight matrix without a bias, (groups, outputs)."""
        return (weight @ self.x.unsqueeze(2)).squeeze(2)

    def variance(self, weight: Tensor) -> Tensor:
        """Return the sum of the variances of the targets, which without any are W x."""
        if self.tt is None or self.t is None:
            weight = weight.to(self.xx.dtype)
            return (quadratic_error(weight, self.xx) - self.mean(weight).square()).sum()
        return (self.tt if self.centred else self.tt - self.t.square()).sum()

    def power(self, original: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the mean squared error of the outputs of a weight and bias, (groups, outputs)."""
        weight = weight.to(self.xx.dtype)
        if self.tx is None or self.tt is None or self.t is None:
            return quadratic_error(weight - original.to(weight.dtype), self.xx)
        shift = torch.zeros_like(self.t) if bias is None else bias.to(self.t.dtype)
        mean = self.mean(weight)
        power = self.tt - 2 * (weight * self.tx).sum(2) + quadratic_error(weight, self.xx)
        if self.centred:
            return power.clamp(min=0) + (self.t - mean - shift).square()
        return (power - 2 * shift * (self.t - mean) + shift.square()).clamp(min=0)

    def wanted(self, weight: Tensor, ridge: float) -> Tensor:
        """Return the weight matrix that is to be rounded, in the dtype of the moments."""
        if self.tx is None:
            return weight.to(self.xx.dtype, copy=True)
        parts = zip(weight, self.xx, self.tx, strict=True)
        return torch.stack([ridge_regression(*part, ridge) for part in parts])

    def bias(self, rounded: Tensor) -> Tensor:
        """Return ``mean(t) - Q mean(x)``, which minimises the error for the weights Q."""
        assert self.t is not None
        return (self.t - self.mean(rounded)).flatten()
