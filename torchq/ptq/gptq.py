"""GPTQ block by block: every layer is rounded for the inputs that the quantized model gives it.

The error of rounded rows Q of a weight W is ``sum((Q - W) H (Q - W)^T)`` with a positive definite
matrix H of input moments. Rows are independent of each other.

References: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers (ICLR 2023), section 3 and algorithm 1; for the asymmetric target, Li et al., GPTAQ
(2025); for the bias, Nagel et al., Data-Free Quantization (ICCV 2019), section 4.2; for coordinate
descent, Behdin et al., QuantEase (2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.calib.search import least_error
from torchq.formats import PerAxis
from torchq.graph import Forward
from torchq.nn.correction import forget_corrections
from torchq.ptq.judging import Judge
from torchq.ptq.layers import (
    Grid,
    check_on_grid,
    find_layers,
    grid_of,
    weight_quantizer,
)
from torchq.ptq.replay import Block, Replay
from torchq.utils import Pattern, evaluating, network_of, undone_on_error
from torchq.workflow.layer_changes import check_finite, own_tensors, report_text
from torchq.workflow.layer_matrices import (
    input_matrix,
    output_matrix,
    weight_from_matrix,
    weight_matrix,
)
from torchq.workflow.runs import Comparison

T = TypeVar("T")

# The pull of the regression towards the float weights, as a fraction of the mean diagonal. With few
# samples for each input it is larger: what cancels their errors by chance does not on others.
_RIDGE, _RIDGE_OF_FEW = 0.1, 3.0
# What this pull is multiplied by, where it foretells the second half of the samples better. Pixels
# of one image are alike, so what is learned of few images can be wrong though pixels are many.
_PULLS = (1.0, 4.0, 16.0, 64.0)
# The inputs for each sample that moments bear without more damping than the least.
_FEW, _DAMPING = 0.05, 0.01
# Columns after which the rest of the matrix is brought up to date, in one product.
_LAZY = 128
# The search for a positive definite matrix ends here.
_MOST_DAMPING = 1e4
# Passes of coordinate descent over the columns, unless nothing changes before.
_SWEEPS = 4
# Ranges that are tried, as fractions of the largest magnitude, down to the smallest one.
_FRACTIONS = 24
_SMALLEST = 0.2
# Rounds of fitting ranges to codes and codes to ranges.
_REFITS = 2
# Bytes of the rows whose candidates are rounded at the same time.
_MEMORY = 1 << 21


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
        outputs: what the new weights do to the outputs of the model. Where they make them worse,
            the model is as it was before the call.
        comparison: the same in a sentence; "" where nothing was compared.
    """

    layers: Mapping[str, GPTQLayer]
    skipped: Mapping[str, str]
    batches: int
    outputs: Comparison = field(default_factory=Comparison)
    comparison: str = ""

    def __str__(self) -> str:
        rows = []
        for name, layer in self.layers.items():
            notes = ["repairs a shortcut"] if layer.repairs_shortcut else []
            notes += [f"damping {layer.damping:g}"]
            error = f"{layer.error_before:.3%} -> {layer.error_after:.3%}"
            rows.append((name, error, ", ".join(notes)))
        header = ("layer", "error of the output, relative", "notes")
        last = f"{len(self.layers)} layers from {self.batches} batches"
        last += f"; {self.comparison}" if self.comparison else ""
        return report_text(header, rows, self.skipped, last)


def gptq_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    block: Pattern | Sequence[Pattern] | None = None,
    num_batches: int | None = None,
    forward: Forward | None = None,
    compare: bool = True,
    progress: bool = True,
) -> GPTQReport:
    """Round the weights of Linear and Conv layers for the least error of their outputs, in place.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`; no
    labels are needed. Afterwards the weights are values of the quantizers' grids, so saving,
    exporting and deploying see exactly these codes.

    Layers are treated one block after the other, in running order, on inputs from the quantized
    blocks before. A layer makes up for the rounding of its inputs, and one whose output is added
    to a shortcut also for the error of the shortcut: ridge regression gives the weights that are
    rounded, pulled to the float ones as far as foretells the other half of each batch best, and the
    bias follows in closed form. The ranges of the weights are searched for the
    least error of the output, and coordinate descent improves the rounding. A layer is changed as
    a whole or not at all; a call that fails or is interrupted leaves the layers that were finished
    as they are, with a warning that names their number.

    At the end the outputs of the model before and after are compared with those of the float model
    on an eighth of the batches, which nothing is fitted to; on the last batch where there are fewer
    than eight. Where they got worse, the whole model is as it was, and the report says so.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            A few hundred images are enough. All are kept in memory.
        block: patterns of the modules that are blocks; None finds them in the structure.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        compare: False fits to all batches, and keeps the result whatever it does to the outputs.
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
    model = network_of(model)
    layers_and_skipped = find_layers("gptq_", model)
    with torch.no_grad(), evaluating(model):
        judge = Judge("gptq_", model, batches, num_batches, forward, compares=compare)
        replay = Replay("gptq_", model, judge.learned, None, forward)
        rounding = BlockRounding(replay)

        def treat(number: int, one: Block) -> None:
            rounding.treat(number, one)
            replay.finish(number, "quantized")

        with judge.trial():
            skipped = replay.treat(
                layers_and_skipped, block, treat, rounding.done, progress
            )
    return GPTQReport(
        rounding.done, skipped, len(judge.learned), judge.outputs, judge.line
    )


class BlockRounding:
    """Rounds the layers of one block after the other.

    ``done`` holds what happened to each, ``wanted`` the matrices that the last block rounded.
    """

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.done: dict[str, GPTQLayer] = {}
        self.wanted: dict[str, Tensor] = {}

    def treat(self, number: int, block: Block) -> None:
        """Round the layers of block ``number``; all blocks before it are finished."""
        self.wanted = {}
        targets, repairing = self._float_outputs(number, list(block.layers))
        for name, layer in block.layers.items():
            repairs = name in repairing
            halves = Moments(), Moments()
            until: Any = "shortcuts" if repairs else "inputs"
            for index in range(len(self.replay.batches)):
                got = self.replay.run(number, index, "quantized", [name], until=until)
                x = input_matrix(layer, layer.input_quantizer(got.inputs.pop(name)))
                target = targets.pop((name, index))
                if name in got.shortcuts:
                    target = target - got.shortcuts[name]
                # A batch is cut between images, whose pixels follow each other.
                inputs = x.tensor_split(2, 2)
                targets_of_halves = output_matrix(layer, target).tensor_split(2, 2)
                for half, *samples in zip(
                    halves, inputs, targets_of_halves, strict=True
                ):
                    half.add(*samples)
            self.done[name], self.wanted[name] = _round_(name, layer, halves, repairs)

    def _float_outputs(
        self, number: int, names: list[str]
    ) -> tuple[dict[tuple[str, int], Tensor], set[str]]:
        """Return the targets of layers by batch, and the layers that are added to a shortcut."""
        targets: dict[tuple[str, int], Tensor] = {}
        repairing: set[str] = set()
        for index in range(len(self.replay.batches)):
            got = self.replay.run(number, index, "float", names)
            for name, out in got.outputs.items():
                targets[name, index] = (
                    out + got.shortcuts[name] if name in got.shortcuts else out
                )
            repairing |= got.shortcuts.keys()
        return targets, repairing


def _round_(
    name: str, layer: Any, halves: tuple[Moments, Moments], repairs_shortcut: bool
) -> tuple[GPTQLayer, Tensor]:
    """Round the weight of ``layer`` in place; change its bias and ranges with it, or nothing.

    ``halves`` are the moments of two halves of the samples. Returned is what happened, and the
    weight matrix that was rounded.
    """
    m = halves[0].joined(halves[1])
    for moments in (m, *halves):
        moments.finish(centred=layer.bias is not None)
    w0 = weight_matrix(layer, layer.weight.detach())
    variance = m.variance()
    check_finite(f"gptq_: {name}", m.count, m.xx, m.tx, m.tt, variance)
    scarcity = m.xx.shape[2] / m.count

    def error(weight: Tensor, bias: Tensor | None) -> float:
        bias = None if bias is None else bias.view(len(w0), -1)
        return float(m.power(weight, bias).sum()) / max(float(variance), 1e-30)

    bias = None if layer.bias is None else layer.bias.detach()
    before = error(grid_of(layer).nearest(w0.to(m.xx.dtype)), bias)
    least_pull = max(_RIDGE, _RIDGE_OF_FEW * scarcity)
    target_weight = m.wanted(w0, least_pull * _best_pull(w0, halves, least_pull))
    diagonals = m.xx.diagonal(dim1=1, dim2=2).clone()
    quantizer = weight_quantizer(layer)
    with undone_on_error(quantizer, written=own_tensors([quantizer])):
        damping = max(_DAMPING, scarcity - _FEW)
        solved = [damped_(matrix, damping, Elimination.of) for matrix in m.xx]
        rounded, amax = round_with_best_ranges(
            layer, target_weight, m.xx, [one for one, _ in solved]
        )
        quantizer.set_amax(amax)
        weight = weight_from_matrix(layer, rounded).to(layer.weight.dtype)
        check_on_grid("gptq_", name, layer, weight)
        m.xx.diagonal(dim1=1, dim2=2).copy_(diagonals)
        if bias is not None:
            bias = m.bias(rounded).to(bias.dtype)
        after = error(weight_matrix(layer, weight), bias)
    layer.weight.copy_(weight)
    forget_corrections(layer)  # They were fitted to the weight before.
    if bias is not None:
        layer.bias.copy_(bias)
    return GPTQLayer(
        before,
        after,
        max(damping_of_group for _, damping_of_group in solved),
        repairs_shortcut,
    ), target_weight


def _best_pull(weight: Tensor, halves: tuple[Moments, Moments], least: float) -> float:
    """Return what of :data:`_PULLS` foretells the second half from the first one best."""
    first, second = halves
    if not (first.count and second.count):
        return 1.0

    def error(factor: float) -> float:
        wanted = first.wanted(weight, least * factor)
        bias = first.bias(wanted).view(len(weight), -1) if first.centred else None
        return float(second.power(wanted, bias).sum())

    return min(_PULLS, key=error)


class Moments:
    """Sums over samples of inputs x, targets t and their products; means after :meth:`finish`.

    The products of one batch are in float32, their sums in float64. The first dimension counts
    groups.
    """

    x: Tensor  # (groups, inputs)
    xx: Tensor  # x x^T, (groups, inputs, inputs)
    t: Tensor  # (groups, outputs)
    tt: Tensor  # t^2, (groups, outputs)
    tx: Tensor  # t x^T, (groups, outputs, inputs)

    def __init__(self) -> None:
        self.count, self.centred = 0, False
        self._sums: dict[str, Tensor] = {}

    def add(self, x: Tensor, t: Tensor) -> None:
        """Add samples ``x``, (groups, inputs, samples), and their targets."""
        x, t = x.float(), t.float()
        parts = {"x": x.sum(2, dtype=torch.float64), "xx": x @ x.mT}
        parts["t"] = t.sum(2, dtype=torch.float64)
        parts |= {"tt": t.square().sum(2), "tx": t @ x.mT}
        for name, part in parts.items():
            if name in self._sums:
                self._sums[name] += part
            else:
                self._sums[name] = part.double()
        self.count += x.shape[2]

    def joined(self, other: Moments) -> Moments:
        """Return the sums over the samples of both, neither of which is finished."""
        result = Moments()
        result.count = self.count + other.count
        result._sums = {
            name: total + other._sums[name] for name, total in self._sums.items()
        }
        return result

    def finish(self, *, centred: bool) -> None:
        """Turn sums into means; if ``centred``, those of products about the means."""
        vars(self).update(
            {n: total.div_(max(self.count, 1)) for n, total in self._sums.items()}
        )
        self._sums = {}
        self.centred = centred
        if centred:
            self.xx -= self.x.unsqueeze(2) * self.x.unsqueeze(1)
            self.tx -= self.t.unsqueeze(2) * self.x.unsqueeze(1)
            self.tt -= self.t.square()

    def mean(self, weight: Tensor) -> Tensor:
        """Return the mean output of a weight matrix without a bias, (groups, outputs)."""
        return (weight @ self.x.unsqueeze(2)).squeeze(2)

    def variance(self) -> Tensor:
        """Return the sum of the variances of the targets."""
        return (self.tt if self.centred else self.tt - self.t.square()).sum()

    def power(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the mean squared error of the outputs of a weight and bias, (groups, outputs)."""
        weight = weight.to(self.xx.dtype)
        power = (
            self.tt - 2 * (weight * self.tx).sum(2) + quadratic_error(weight, self.xx)
        )
        if bias is None:
            return power.clamp(min=0)
        return (
            power.clamp(min=0)
            + (self.t - self.mean(weight) - bias.to(self.t.dtype)).square()
        )

    def wanted(self, weight: Tensor, ridge: float) -> Tensor:
        """Return the weight matrix that is to be rounded, in the dtype of the moments."""
        parts = zip(weight, self.xx, self.tx, strict=True)
        return torch.stack([ridge_regression(*part, ridge) for part in parts])

    def bias(self, rounded: Tensor) -> Tensor:
        """Return ``mean(t) - Q mean(x)``, which minimises the error for the weights Q."""
        return (self.t - self.mean(rounded)).flatten()


def quadratic_error(difference: Tensor, h: Tensor) -> Tensor:
    """Return ``d H d^T`` of each row d of (..., rows, columns), with H (..., columns, columns)."""
    return (difference @ h).mul_(difference).sum(-1)


def damped_(h: Tensor, damping: float, solve: Callable[[Tensor], T]) -> tuple[T, float]:
    """Return ``solve(H)`` after damping H in place, and the fraction that it needed.

    This fraction of the mean of the diagonal is added to the diagonal; zeros become the fraction.
    It grows tenfold while ``solve`` finds a matrix that is not positive definite, because it is
    singular or because of rounding.
    """
    diagonal = h.diagonal().clone()
    mean = diagonal.mean()
    unit = torch.where(mean > 0, mean, 1.0)
    while True:
        h.diagonal().copy_(diagonal + damping * unit)
        try:
            return solve(h), damping
        except torch.linalg.LinAlgError:
            if damping > _MOST_DAMPING:
                raise
        damping *= 10


def ridge_regression(weight: Tensor, xx: Tensor, tx: Tensor, ridge: float) -> Tensor:
    """Return the weights that minimise ``mean((t - W x)^2) + r |W - weight|^2``, (rows, columns).

    ``xx`` are moments of the inputs, (columns, columns), whose diagonal is changed and restored,
    and ``tx`` those of targets and inputs. ``ridge`` is r as a fraction of the mean of the diagonal
    of ``xx``.
    """
    diagonal = xx.diagonal().clone()
    try:
        damped_(xx, ridge, torch.linalg.cholesky)
        r = xx.diagonal().mean() - diagonal.mean()
        factors, pivots = torch.linalg.lu_factor(xx)
    finally:
        xx.diagonal().copy_(diagonal)
    right_side = tx + r * weight.to(tx.dtype)
    return torch.linalg.lu_solve(factors, pivots, right_side.T).T.contiguous()


@dataclass(frozen=True)
class Elimination:
    """The order of columns, those with large diagonals of H first, and how the rest makes up.

    ``factor`` is the upper Cholesky factor of the inverse of H in this order.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, h: Tensor) -> Elimination:
        """Return the elimination for a positive definite H; else raise LinAlgError."""
        order = h.diagonal().argsort(descending=True, stable=True)
        # LAPACK works in place where the entries of a column lie next to each other.
        matrix = h.mT[order.unsqueeze(1), order].mT
        torch.linalg.cholesky(matrix, out=matrix)
        torch.cholesky_inverse(matrix, out=matrix)
        torch.linalg.cholesky(matrix, upper=True, out=matrix)
        return cls(order, matrix)


def round_rows_(weight: Tensor, elimination: Elimination, grid: Grid) -> None:
    """Round ``weight`` by GPTQ, in place.

    One column is rounded after the other. Each error is made up for by the columns that are not
    rounded yet, as well as they can: by ``-error / U[i, i] * U[i, i + 1:]``, where U is the upper
    Cholesky factor of the inverse of H. ``weight`` is (rows, columns), in the dtype of H.
    """
    order, u = elimination.order, elimination.factor
    columns = order.tolist()
    w = weight[:, order]
    for start in range(0, w.shape[1], _LAZY):
        end = min(start + _LAZY, w.shape[1])
        errors = torch.empty_like(w[:, start:end])
        for i in range(start, end):
            rounded = grid.nearest(w[:, i], columns[i])
            error = (w[:, i] - rounded) / u[i, i]
            w[:, i] = rounded
            w[:, i + 1 : end] -= error.unsqueeze(1) * u[i, i + 1 : end]
            errors[:, i - start] = error
        w[:, end:] -= errors @ u[start:end, end:]
    weight[:, order] = w


def round_groups_(
    weight: Tensor, eliminations: Iterable[Elimination], grid: Grid
) -> None:
    """Round every group of ``weight`` by GPTQ, in place."""
    for part in zip(weight, eliminations, grid.groups(), strict=True):
        round_rows_(*part)


def descend(rounded: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    """Return ``rounded`` after coordinate descent, which never makes the error of a row larger.

    Each column in turn takes the grid value that is best for the values of all others. ``rounded``
    is on the grid, and ``weight`` is what was rounded, both (rows, columns).
    """
    q = rounded.clone()
    gradient = (q - weight) @ h
    diagonal = h.diagonal()
    for _ in range(_SWEEPS):
        changed = False
        for i in range(q.shape[1]):
            best = grid.nearest(q[:, i] - gradient[:, i] / diagonal[i], i)
            change = best - q[:, i]
            if bool(change.any()):
                gradient += change.unsqueeze(1) * h[i]
                q[:, i] = best
                changed = True
        if not changed:
            break
    return q


def _descend_groups(q: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    parts = zip(q, weight, h, grid.groups(), strict=True)
    return torch.stack([descend(*part) for part in parts])


def _better(
    one: Tensor, other: Tensor, weight: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """Return for each row whether ``one`` is better than ``other``, and the better of both."""
    is_better = quadratic_error(one - weight, h) < quadratic_error(other - weight, h)
    return is_better, torch.where(is_better.unsqueeze(2), one, other)


def round_with_best_ranges(
    layer: Any, weight: Tensor, h: Tensor, solved: list[Elimination]
) -> tuple[Tensor, Tensor]:
    """Return a rounded weight matrix, and the range of the weight that goes with it.

    Where each row has one range, every candidate is rounded by GPTQ, and each row takes the one
    with the least error. Then the ranges are fitted to the codes by least squares, and the codes to
    the ranges by coordinate descent, in turn. Other granularities take the candidate with the least
    error of nearest rounding, weighted by the diagonal of H.

    ``weight`` is (groups, rows, columns) and ``h`` (groups, columns, columns), positive definite.
    """
    granularity = weight_quantizer(layer).descriptor.granularity
    largest = granularity.amax(weight.reshape(layer.weight.shape)).float()
    fractions = torch.linspace(
        1, _SMALLEST, _FRACTIONS, dtype=torch.float32, device="cpu"
    ).tolist()
    one_each = isinstance(granularity, PerAxis) and granularity.axes == (0,)
    if one_each:
        q, amax = _best_of_candidates(layer, weight, h, solved, largest, fractions)
    else:
        amax = _weighted_search(layer, weight, h, largest, fractions)
        q = weight.clone()
        round_groups_(q, solved, grid_of(layer, amax))
    # No row shall be worse than rounded to nearest.
    grid = grid_of(layer, amax)
    ours, other = (
        _descend_groups(s, weight, h, grid) for s in (q, grid.nearest(weight))
    )
    q = _better(other, ours, weight, h)[1]
    for _ in range(_REFITS if one_each else 0):
        amax, q = _refit(layer, weight, h, amax, q)
    return q, amax


def _best_of_candidates(
    layer: object,
    weight: Tensor,
    h: Tensor,
    solved: list[Elimination],
    largest: Tensor,
    fractions: list[float],
) -> tuple[Tensor, Tensor]:
    """Return the rounded rows with the best of some ranges, and these ranges.

    All candidates of some rows are rounded at the same time.
    """
    # The first column is like the others if a row has one range.
    grids = [grid_of(layer, largest * fraction) for fraction in fractions]
    scales = torch.stack([grid.scale[..., :1] for grid in grids], 1)
    divisors = torch.stack([grid.divisor[..., :1] for grid in grids], 1)
    columns = weight.shape[2]
    q = torch.empty_like(weight)
    best = []
    step = max(1, _MEMORY // (columns * 8))
    for start in range(0, weight.shape[1], step):
        rows = slice(start, start + step)
        part = weight[:, rows]
        tried = part.repeat(1, len(grids), 1)
        scale, divisor = (
            t[:, :, rows].flatten(1, 2).expand(-1, -1, columns)
            for t in (scales, divisors)
        )
        round_groups_(tried, solved, Grid(scale, divisor, grids[0].format))
        tried = tried.unflatten(1, (len(grids), -1))
        errors = [quadratic_error(one - part, h) for one in tried.unbind(1)]
        best.append(torch.stack(errors, 1).argmin(1))  # (groups, rows)
        index = best[-1].unsqueeze(1).unsqueeze(3).expand(-1, 1, -1, columns)
        q[:, rows] = tried.gather(1, index).squeeze(1)
    fraction = largest.new_tensor(fractions)[torch.cat(best, 1)]
    return q, largest * fraction.view(largest.shape)


def _refit(
    layer: object, weight: Tensor, h: Tensor, amax: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Return better ranges for the codes of ``q``, and better codes for these ranges."""
    grid = grid_of(layer, amax)
    codes = q / grid.scale
    along = codes @ h
    scale = (along * weight).sum(-1) / (along * codes).sum(-1).clamp(min=1e-300)
    fitted = (scale * grid.format.qmax).view(amax.shape).float()
    fitted = torch.where((fitted > 0) & fitted.isfinite(), fitted, amax)
    new = grid_of(layer, fitted)
    start = (codes.to(new.scale.dtype) * new.scale).to(q.dtype)
    is_better, better_codes = _better(
        _descend_groups(start, weight, h, new), q, weight, h
    )
    return torch.where(is_better.view(amax.shape), fitted, amax), better_codes


def _weighted_search(
    layer: Any, weight: Tensor, h: Tensor, largest: Tensor, fractions: list[float]
) -> Tensor:
    """Return the range with the least error of nearest rounding, weighted by the diagonal of H."""
    granularity = weight_quantizer(layer).descriptor.granularity
    importance = h.diagonal(dim1=1, dim2=2).unsqueeze(1)

    def error(amax: Tensor) -> Tensor:
        rounded = grid_of(layer, amax).nearest(weight)
        loss = ((rounded - weight).square() * importance).float()
        parts = granularity.split(loss.reshape(layer.weight.shape))
        dims = granularity.reduce_dims(parts.dim())
        return (parts.sum(dims) if dims else parts).view(largest.shape)

    return least_error([(largest * fraction,) for fraction in fractions], error)[0]
