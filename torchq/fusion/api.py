"""The entry point: plan on a copy, check the copy, then change the model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from warnings import warn

import torch
from torch import Tensor, nn

from torchq.errors import FuseError
from torchq.fusion.batchnorm.fold import plan_fold
from torchq.fusion.batchnorm.pairs import find_flow, find_pairs
from torchq.fusion.linear_map.solve import relative_error
from torchq.fusion.modules import holds_quantizers, is_norm
from torchq.fusion.reparam.rule import plan_blocks
from torchq.fusion.reparam.traced_sums import plan_unknown_blocks
from torchq.fusion.report import FuseReport, Fusion, Refusal
from torchq.graph import call_model, tensors_in
from torchq.utils import evaluating

__all__ = ["fuse_"]

#: Whole-model limits, relative to the largest output: each fold is exact to rounding, but depth and sharp activations amplify rounding.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_COPY = "Make weights that weight_norm or pruning compute permanent first"
QUANTIZED_TOLERANCE = (
    5e-2  # rounding noise moves an activation that lies between two codes to the other one
)
_PASSES = 4  # a layer between two BatchNorms absorbs one per pass


class Edit(Protocol):
    """A planned change."""

    @property
    def fusion(self) -> Fusion:
        """Its row in the report."""
        ...

    def apply(self, model: nn.Module) -> None:
        """Carry it out on the model or a copy of it."""
        ...


@dataclass
class _Plan:
    edits: list[Edit] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, model: nn.Module, results: Sequence[Edit | Refusal]) -> int:
        """Apply what was planned to ``model``, keep it for the real one, and say how much it was."""
        edits = [result for result in results if not isinstance(result, Refusal)]
        for result in results:
            if isinstance(result, Refusal):
                self.refused.setdefault(result.name, result)
        for edit in edits:
            edit.apply(model)
        self.edits += edits
        return len(edits)

    def settle(self, model: nn.Module) -> None:
        """Forget refusals of blocks that were merged in another way, and of BatchNorms, which are about to be looked at again."""
        merged = {edit.fusion.name for edit in self.edits}
        self.refused = {
            name: r
            for name, r in self.refused.items()
            if name not in merged and not is_norm(_find(model, name))
        }


def fuse_(
    model: nn.Module,
    example: Any = None,
    *,
    verify: bool = True,
    dry_run: bool = False,
    reparameterize: bool = True,
    constant_pad: bool = False,
) -> FuseReport:
    """Fold BatchNorms and merge parallel linear branches, in place, exactly.

    Everything is computed in float64 and compared with the unfused layers on random inputs before the model is touched. Layers stay
    the same objects with new parameters; a folded BatchNorm becomes an Identity (or its own activation). What cannot be merged
    exactly is left as it is, and the report says why. A second call finds nothing left to do.

    Call it on a trained model in eval mode, before :func:`torchq.quantize_`, and before the optimizer is made: parameters are new objects.

    Args:
        model: changed in place.
        example: one input: a tensor, a tuple of positional or a dict of keyword arguments. With it, models that torch.fx cannot trace
            are followed by running them, and the whole model is compared before and after.
        verify: compare each merge, and with an example the whole model. Off, only merges whose algebra is certain are made.
        dry_run: change nothing; the report says what would be done.
        reparameterize: also merge the branches of RepVGG, MobileOne and other blocks (see docs/fuse.md).
        constant_pad: also fold a BatchNorm in front of a zero-padded convolution, by padding explicitly with its zero point.

    Returns:
        The report. Where the whole model is off by more than rounding, it says by how much, the model is exactly as before, and a
        warning is given.

    Raises:
        FuseError: this is no module, every BatchNorm is in training mode, or the model is scripted or cannot be copied.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
        >>> print(torchq.fuse_(model))  # doctest: +ELLIPSIS
        1 fused, 0 refused, applied
          0  <- 1  [norm after layer, fx, error ...]
    """
    _check_model(model)
    with torch.inference_mode(
        False
    ):  # gradients are how some kernels are found, and new parameters are to be trained
        plan, report = _plan_all(
            model,
            example,
            verify,
            constant_pad,
            (plan_blocks, plan_unknown_blocks) if reparameterize else (),
        )
        return _finish(model, plan, report, dry_run)


def _plan_all(
    model: nn.Module,
    example: Any,
    verify: bool,
    constant_pad: bool,
    merges: Sequence[Callable[[nn.Module], Sequence[Edit | Refusal]]],
) -> tuple[_Plan, FuseReport]:
    """All that can be merged, carried out on a copy, which is compared with the model."""
    plan = _Plan()
    try:
        trial = copy.deepcopy(model)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise FuseError(
            f"fuse_: the model cannot be copied ({reason}); expected one that copy.deepcopy takes. {_COPY}"
        ) from error
    _merge(plan, trial, merges)
    # A branch that could not be followed because of its BatchNorm may be one convolution now.
    while _fold(plan, trial, example, verify, constant_pad) and _merge(plan, trial, merges[1:]):
        pass
    report = FuseReport(
        tuple(edit.fusion for edit in plan.edits),
        tuple(plan.refused.values()),
        notes=tuple(plan.notes),
    )
    if verify and example is not None and plan.edits:
        report = _compare(model, trial, example, report)
    return plan, report


def _merge(
    plan: _Plan,
    trial: nn.Module,
    finders: Sequence[Callable[[nn.Module], Sequence[Edit | Refusal]]],
) -> int:
    """Merge branches until nothing is left; how much it was."""
    count = 0
    for find in finders:
        for _ in range(_PASSES):
            found = plan.add(trial, find(trial))
            count += found
            if not found:
                break
    return count


def _fold(plan: _Plan, trial: nn.Module, example: Any, verify: bool, constant_pad: bool) -> int:
    """Fold BatchNorms until nothing is left; how many it were."""
    count = 0
    for _ in range(_PASSES):
        try:
            flow, notes = find_flow(trial, example)
        except Exception:
            if plan.edits and verify:  # the comparison of the whole model will report it
                break
            raise
        pairs, refusals = find_pairs(trial, flow, constant_pad=constant_pad)
        plan.settle(trial)
        plan.notes = list(notes)
        folded = plan.add(trial, [plan_fold(trial, pair, verify=verify) for pair in pairs])
        plan.add(trial, refusals)
        count += folded
        if not folded:
            break
    return count


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise FuseError(
            f"fuse_: got a {type(model).__name__}; expected a torch.nn.Module. It is changed in place and a report is returned"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise FuseError(
            f"fuse_: got a {type(model).__name__}; expected a module in Python. Fuse before torch.jit.script or trace"
        )
    norms = [module for module in model.modules() if is_norm(module)]
    if model.training and norms and all(norm.training for norm in norms):
        raise FuseError(
            "fuse_: the model is in training mode; expected eval mode, whose running statistics are folded. Call model.eval() first"
        )


def _compare(model: nn.Module, trial: nn.Module, example: Any, report: FuseReport) -> FuseReport:
    """Run both on the example with the same random numbers; the limit is that of the lowest precision among the outputs."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})

    def run(candidate: nn.Module) -> list[Tensor]:
        with evaluating(candidate), torch.no_grad(), torch.random.fork_rng(devices):
            torch.manual_seed(0)
            found = tensors_in(call_model(candidate, copy.deepcopy(example)))
            return [t.detach().double().cpu() for t in found if t.is_floating_point()]

    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} or {torch.float32}
    limit = max(TOLERANCE.get(dtype, 1e-4) for dtype in dtypes)
    if holds_quantizers(model):
        limit = max(limit, QUANTIZED_TOLERANCE)
    before, notes = run(model), report.notes
    try:
        after = run(trial)
    except (
        Exception
    ) as failure:  # a forward that asks for what a BatchNorm has and an Identity has not
        reason = f"the fused model fails ({type(failure).__name__}: {failure})"
        return replace(report, error=math.inf, tolerance=limit, notes=(*notes, reason))
    error = _difference(after, before)
    if not error <= limit:  # rounding may swap near-ties in a ranking; what has swapped is equal
        reordered = _difference(
            *([t.flatten().sort().values for t in found] for found in (after, before))
        )
        if reordered <= limit:
            error, notes = (
                reordered,
                (
                    *notes,
                    "the outputs agree, but in another order, as after top-k or NMS with ties",
                ),
            )
    return replace(report, error=error, tolerance=limit, notes=notes)


def _difference(after: list[Tensor], before: list[Tensor]) -> float:
    return (
        max(map(relative_error, after, before), default=0.0)
        if len(after) == len(before)
        else math.inf
    )


def _finish(model: nn.Module, plan: _Plan, report: FuseReport, dry_run: bool) -> FuseReport:
    if (
        report.error is not None
        and report.tolerance is not None
        and not report.error <= report.tolerance
    ):
        warn(
            f"fuse_: the fused model is off by {report.error:.1e}; expected at most {report.tolerance:.0e}. The model is left as it was",
            stacklevel=3,
        )
        return report
    if dry_run or not plan.edits:
        return report
    for edit in plan.edits:
        edit.apply(model)
    return replace(report, applied=True)
