"""``fuse_``: plan on a copy, compare the copy with the model, then change the model.

A pass is a function that finds merges in a trial copy of the model, carries them out on the copy,
notes them as edits, and returns how many there were. Its docstring states what it expects
(Before) and what it leaves (After). The real model is changed once, by the edits, at the end.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from torchq.errors import FuseError
from torchq.fusion.blocks import BlockEdit, plan_blocks
from torchq.fusion.fold import FoldEdit, plan_fold
from torchq.fusion.linear_map import relative_error
from torchq.fusion.modules import holds_quantizers, is_norm
from torchq.fusion.on_grid import plan_on_grid
from torchq.fusion.pairs import find_flow, find_pairs
from torchq.fusion.record import recording
from torchq.fusion.report import FuseReport, Refusal
from torchq.fusion.unfolded import keep_norms_
from torchq.graph import Graph, call_model, graph_pass, tensors_in
from torchq.utils import (
    copy_module,
    evaluating,
    network_of,
    progress_bar,
    progress_stages,
    random_seeded,
    undone_on_error,
)

#: Limits for the whole model by dtype, relative to the largest output. Each fold is exact to
#: rounding, but depth and sharp activations amplify rounding.
TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}


_MOST_ROUNDS = 4  # a layer between two BatchNorms absorbs one in each round


#: A planned change: it has a row of the report (``fusion``), is applied to the model and to copies
#: of it (``apply``), and is told as JSON data (``record``).
Edit = FoldEdit | BlockEdit


@dataclass
class Trial:
    """A copy of the model that passes change, the options, and what was found, some by path.

    Attributes:
        keeping: the paths of layers with a BatchNorm behind them whose numbers forbid the fold.
    """

    model: nn.Module
    example: Any = None
    verify: bool = True
    constant_pad: bool = False
    progress: bool = False
    edits: list[Edit] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    keeping: tuple[str, ...] = ()

    def carry_out(self, results: Sequence[Edit | Refusal]) -> int:
        """Apply the edits among ``results`` to the copy; return how many there were."""
        before = len(self.edits)
        for result in results:
            if isinstance(result, Refusal):
                self.refused.setdefault(result.name, result)
            else:
                result.apply(self.model)
                self.edits.append(result)
        return len(self.edits) - before

    def bar(self, items: Sequence[object], description: str) -> Any:
        """Iterate over ``items`` behind a progress bar that appears after a second."""
        return progress_bar(
            items, description=description, enabled=self.progress, unit="module"
        )


#: Changes ``trial.model`` and returns how many merges it made.
Pass = Callable[[Trial], int]


def merge_known_blocks(trial: Trial) -> int:
    """Merge the branches of blocks whose family is registered.

    Before: ``act(bn(conv3x3(x)) + bn(conv1x1(x)) + bn(x))`` in a block that a rule matches.
    After: ``act(conv3x3(x))``, at the attribute that the family's deployed form has.
    """
    modules = list(trial.model.named_modules())
    return trial.carry_out(plan_blocks(trial.bar(modules, "merge blocks")))


def fold_batchnorms(trial: Trial) -> int:
    """Fold each BatchNorm into the layer before it, or into all layers behind it.

    Before: ``bn(layer(x))`` or ``layer(bn(x))``, where nothing else reads the value in between.
    After: ``layer(x)`` with other parameters, and an Identity (or the activation of the
    BatchNorm) in the place of the BatchNorm.
    """
    try:
        flow, notes = find_flow(trial.model, trial.example)
    except Exception:
        # The comparison of the whole model will report it.
        if trial.edits and trial.verify:
            return 0
        raise
    pairs, refusals = find_pairs(trial.model, flow, constant_pad=trial.constant_pad)
    modules = dict(trial.model.named_modules(remove_duplicate=False))
    for name in [name for name in trial.refused if is_norm(modules.get(name))]:
        del trial.refused[name]  # it has just been looked at again
    trial.notes = list(notes)
    on_grid = [pair for pair in pairs if pair.is_on_grid(trial.model)]
    in_float = [pair for pair in pairs if pair not in on_grid]
    bar = trial.bar(in_float, "fold BatchNorm")
    planned = [plan_fold(trial.model, pair, verify=trial.verify) for pair in bar]
    planned += plan_on_grid(trial.model, on_grid, trial.example, verify=trial.verify)
    order = {pair.norm: position for position, pair in enumerate(pairs)}
    behind_layer = {pair.norm: pair.layers[0] for pair in pairs if not pair.before}
    trial.keeping = tuple(
        behind_layer[result.name]
        for result in planned
        if isinstance(result, Refusal) and result.name in behind_layer
    )
    planned.sort(key=lambda result: order[norm_of(result)])
    return trial.carry_out([*planned, *refusals])


def norm_of(result: FoldEdit | Refusal) -> str:
    """Return the path of the BatchNorm that is folded or refused."""
    if isinstance(result, Refusal):
        return result.name
    assert result.fusion is not None
    return result.fusion.parts[0]


#: The passes in their order: a BatchNorm inside a block goes with the block.
PASSES: tuple[Pass, ...] = (merge_known_blocks, fold_batchnorms)


def run_passes(trial: Trial, passes: Sequence[Pass] = PASSES) -> None:
    """Run passes on a trial, one after the other, each until it finds nothing."""
    for merge in passes:
        for _ in range(_MOST_ROUNDS):
            if not merge(trial):
                break


def fuse_(
    model: nn.Module,
    example: object = None,
    *,
    verify: bool = True,
    dry_run: bool = False,
    reparameterize: bool = True,
    constant_pad: bool = False,
    progress: bool = True,
) -> FuseReport:
    """Fold BatchNorms and merge parallel linear branches, in place, exactly.

    Everything is computed in float64 and compared with the unfused layers on random inputs before
    the model is touched. A quantized layer takes a BatchNorm on the grid of its own weight: the
    codes stay and take the signs of the factors, their scales grow. It is compared by its codes,
    and by its result on the input that it gets on the example.

    Layers stay the same objects with new parameters; a folded BatchNorm becomes an Identity (or its
    own activation). What cannot be merged exactly is left as it is, and the report says why. A
    second call finds nothing left to do. A call that fails or is interrupted leaves the model as it
    was.

    Call it on a trained model in eval mode, before :func:`torchq.quantize_`, and before the
    optimizer is created: merged parameters are new objects.

    Args:
        model: changed in place.
        example: one input: a tensor, a tuple of positional or a dict of keyword arguments. With
            it, models that torch.fx cannot trace are followed by running them, and the whole
            model is compared before and after.
        verify: compare each merge, and with an example the whole model. With False, only merges
            whose algebra is certain are made.
        dry_run: change nothing; the report says what would be done.
        reparameterize: also merge the branches of RepVGG, MobileOne and other blocks (see
            docs/fuse.md).
        constant_pad: also fold a BatchNorm in front of a zero-padded convolution, by padding
            explicitly with the value that the BatchNorm maps to zero.
        progress: show the stages, and progress bars for what takes longer than a second.

    Returns:
        The report. If the fused model differs from ``model`` by more than rounding, the report
        says by how much, the model is as before, and a warning is given. Of a quantized model the
        difference is shown and refuses nothing: ties between two codes decide it. What was done is
        also kept with the model, see :func:`torchq.fusion.fusion_record`.

    Raises:
        FuseError: ``model`` is no module, every BatchNorm is in training mode, or the model is
            scripted or cannot be copied.
        ConfigError: ``example`` does not tell which arguments it holds.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
        >>> print(torchq.fuse_(model))  # doctest: +ELLIPSIS
        1 fused, 0 refused, applied
          0  <- 1  [norm after layer, fx, error ...]
    """
    model = network_of(model)
    _check_model(model)
    # Some kernels are read from gradients, and new parameters are to be trained.
    with (
        torch.inference_mode(False),
        progress_stages("fuse", ("merge", "compare"), enabled=progress) as next_stage,
    ):
        trial = Trial(_copy(model), example, verify, constant_pad, progress)
        run_passes(trial, PASSES if reparameterize else (fold_batchnorms,))
        rows = tuple(edit.fusion for edit in trial.edits if edit.fusion is not None)
        refused = tuple(trial.refused.values())
        notes = tuple(trial.notes)
        record = tuple(edit.record() for edit in trial.edits)
        report = FuseReport(rows, refused, notes=notes, record=record)
        next_stage()
        if verify and example is not None and trial.edits:
            report = _compare(model, trial.model, example, report)
        return _finish(model, trial, report, dry_run)


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy_module(model)
    except Exception as error:  # classes copy themselves in any way they like
        path, culprit = _innermost_uncopyable(model)
        reason = str(error).partition("\n")[0]
        raise FuseError(
            f"fuse_: {path or '(root)'}: got a {type(culprit).__name__} that cannot be copied"
            f" ({reason}); expected one that copy.deepcopy can copy. Replace it while fusing"
        ) from error


def _innermost_uncopyable(model: nn.Module) -> tuple[str, nn.Module]:
    """Return path and object of the deepest module of ``model`` that cannot be copied."""
    for name, child in model.named_children():
        try:
            copy_module(child)
        except Exception:  # see _copy
            path, culprit = _innermost_uncopyable(child)
            return f"{name}.{path}".rstrip("."), culprit
    return "", model


def _check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise FuseError(
            f"fuse_: got a {type(model).__name__}; expected a torch.nn.Module. It is changed in"
            " place and a report is returned"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise FuseError(
            f"fuse_: got a {type(model).__name__}; expected a module in Python. Fuse before"
            " torch.jit.script or trace"
        )
    norms = [module for module in model.modules() if is_norm(module)]
    if model.training and norms and all(norm.training for norm in norms):
        raise FuseError(
            "fuse_: the model is in training mode; expected eval mode, whose running statistics"
            " are folded. Call model.eval() first"
        )


def _compare(
    model: nn.Module, fused: nn.Module, example: object, report: FuseReport
) -> FuseReport:
    """Compare both models on the example, within the limit of the lowest precision in use.

    There is no limit for a quantized model, in which a tie between two codes falls to either side
    for the last bit. Its folds were judged layer by layer.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {
        torch.float32
    }
    limit = (
        None if holds_quantizers(model) else max(TOLERANCE.get(d, 1e-4) for d in dtypes)
    )
    before = _outputs(model, example)
    notes = report.notes
    try:
        after = _outputs(fused, example)
    # A forward that reads what a BatchNorm has and an Identity lacks.
    except Exception as failure:
        reason = f"the fused model fails ({type(failure).__name__}: {failure})"
        return replace(
            report, error=math.inf, tolerance=limit or 0.0, notes=(*notes, reason)
        )
    error = _difference(after, before)
    if (
        limit is not None and not error <= limit
    ):  # rounding may swap near-ties in a ranking; equal values were swapped
        reordered = _difference(_sorted(after), _sorted(before))
        if reordered <= limit:
            error = reordered
            reason = "the outputs agree, but in another order, as after top-k or NMS with ties"
            notes = (*notes, reason)
    return replace(report, error=error, tolerance=limit, notes=notes)


def _outputs(model: nn.Module, example: object) -> list[Tensor]:
    """Return the floating-point outputs on a copy of the example, float64 on the CPU."""
    with evaluating(model), torch.no_grad(), random_seeded(0):
        tensors = tensors_in(call_model(model, copy.deepcopy(example)))
        return [t.detach().double().cpu() for t in tensors if t.is_floating_point()]


def _sorted(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.flatten().sort().values for tensor in tensors]


def _difference(after: list[Tensor], before: list[Tensor]) -> float:
    if len(after) != len(before):
        return math.inf
    return max(map(relative_error, after, before), default=0.0)


def _finish(
    model: nn.Module, trial: Trial, report: FuseReport, dry_run: bool
) -> FuseReport:
    """Apply the edits to the model, unless the comparison failed or nothing is to be changed."""
    error, limit = report.error, report.tolerance
    if error is not None and limit is not None and not error <= limit:
        warn(
            f"fuse_: the fused model is off by {error:.1e}; expected at most"
            f" {limit:.0e}. The model is left as it was",
            stacklevel=3,
        )
        return report
    if dry_run:
        return report
    if not trial.edits:
        keep_norms_(model, trial.keeping)
        return report
    with undone_on_error(model), recording(model, report.record):
        for edit in trial.edits:
            edit.apply(model)
    # Last, as a call that fails changes nothing.
    keep_norms_(model, trial.keeping)
    return replace(report, applied=True)


def _fused(graph: Graph, reparameterize: bool) -> Graph:
    module = copy.deepcopy(graph.module)
    example = graph.attributes.get("example")
    fuse_(module, example, reparameterize=reparameterize, progress=False)
    return graph.with_module(module)


@graph_pass(rounding=1e-4)
def fold_bn(graph: Graph) -> Graph:
    """Fold each BatchNorm into the layer before it, or behind it, where that is exact."""
    return _fused(graph, reparameterize=False)


@graph_pass(rounding=1e-4)
def merge_branches(graph: Graph) -> Graph:
    """Merge parallel linear branches into one layer, and fold BatchNorms."""
    return _fused(graph, reparameterize=True)
