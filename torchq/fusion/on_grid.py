"""Folding BatchNorms into quantized layers: planned on copies, and judged layer by layer.

A fold is judged by the codes of its layer, and by the layer's result on an input that it gets in
the model. The whole model cannot tell: an activation on a tie between two codes falls to the other
side for a difference in the last bit, and what follows differs as much as the model differs from
itself in float64.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.fusion.fold import (
    TOLERANCE,
    FoldEdit,
    GridFold,
    cannot_be_checked,
    is_of_torch,
    paths_of,
    run,
    sample,
)
from torchq.fusion.linear_map import relative_error
from torchq.fusion.modules import (
    OutputFold,
    holders_of,
    norm_affine,
    output_quantizer_of,
    weight_slot,
)
from torchq.fusion.pairs import Pair
from torchq.fusion.report import Fusion, Refusal
from torchq.graph import call_model
from torchq.utils import copy_module, evaluating, random_seeded, watching


@dataclass
class Trial:
    """A fold that a copy of the layer has carried out.

    Attributes:
        pair: the BatchNorm and its layer.
        layer: as it was.
        folded: the copy.
        outcome: what the copy says.
        fold: the map that it folded.
        edit: the change of the model.
        error: the largest difference of a result, relative to the largest result; None while none
            was compared.
        off: how often the largest allowed difference the largest difference is.
        failure: why the copy could not be run.
    """

    pair: Pair
    layer: Any
    folded: Any
    outcome: OutputFold
    fold: GridFold
    edit: FoldEdit
    error: float | None = None
    off: float = 0.0
    failure: Exception | None = None

    def compare(self, got: Tensor, want: Tensor) -> None:
        """Compare results with output channels on axis 0 in the channels whose codes stayed."""
        exact = self.outcome.exact
        # (channels, everything else)
        got = got.detach().double().cpu().reshape(len(exact), -1)
        want = want.detach().double().cpu().reshape(len(exact), -1)
        if not want.numel():
            return
        shift = self.fold.shift
        terms = (want - shift[:, None]).abs().max() + shift.abs().max()
        difference = (got - want).abs().amax(1)
        allowed = self.outcome.relative * terms + self.outcome.absolute
        off = (
            torch.where(exact, difference / allowed.clamp_min(1e-30), 0.0).max().item()
        )
        error = difference.max().item() / max(want.abs().max().item(), 1e-30)
        self.off = max(self.off, off)
        self.error = max(self.error or 0.0, error)

    def judged(self) -> FoldEdit | Refusal:
        """Return the change with what was seen of it, or why it is none."""
        path = self.pair.layers[0]
        if self.failure is not None:
            return Refusal(self.pair.norm, cannot_be_checked(path, self.failure))
        if not self.off <= 1.0:
            return Refusal(
                self.pair.norm,
                f"folding it into {path} would be off by {self.error or 0.0:.1e} (relative to its"
                f" largest result), {self.off:.3g} times what rounding explains",
            )
        assert self.edit.fusion is not None
        return replace(
            self.edit, fusion=replace(self.edit.fusion, error=self.error or 0.0)
        )


def plan_on_grid(
    model: nn.Module, pairs: Sequence[Pair], example: object, *, verify: bool
) -> list[FoldEdit | Refusal]:
    """Return what folds each pair of a quantized layer and the BatchNorm behind it, or why not.

    Each is judged alone, so one that is refused leaves the others as they are.

    Args:
        model: left unchanged.
        pairs: of BatchNorms behind layers.
        example: as for :func:`torchq.fuse_`; None takes random inputs.
        verify: compare the results of layers. Codes are always compared.
    """
    results: list[FoldEdit | Refusal | Trial] = [
        _attempt(model, pair) for pair in pairs
    ]
    trials = [result for result in results if isinstance(result, Trial)]
    if verify and trials:
        if example is not None:
            _compare_in_model(model, trials, example)
        for trial in trials:
            norm = model.get_submodule(trial.pair.norm)
            if trial.error is None and trial.failure is None:
                _compare_on_random(trial)
            if not (is_of_torch(norm) or output_quantizer_of(norm) is not None):
                _compare_norm(trial, norm)
    return [
        result.judged() if isinstance(result, Trial) else result for result in results
    ]


def _attempt(model: nn.Module, pair: Pair) -> Trial | Refusal:
    """Let a copy of a layer fold its BatchNorm, and compare its codes."""
    path = pair.layers[0]
    norm = model.get_submodule(pair.norm)
    layer = model.get_submodule(path)
    scale, shift = norm_affine(norm)
    if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
        return Refusal(
            pair.norm, "has a variance and eps whose root is no finite number above 0"
        )
    folded: Any = copy_module(layer)
    outcome: OutputFold = folded.fold_output_(scale, shift)
    if not bool(
        torch.isfinite(folded.weight).all() and torch.isfinite(folded.bias).all()
    ):
        return Refusal(
            pair.norm, f"folding it into {path} overflows {folded.weight.dtype}"
        )
    reason = layer.folded_codes_obstacle(folded, scale, outcome)  # type: ignore[operator]
    if reason is not None:
        return Refusal(pair.norm, f"folding it into {path} {reason}")
    fusion = Fusion(
        path,
        "norm after layer",
        (pair.norm,),
        0.0,
        pair.found_by,
        scale.abs().max().item(),
        codes=outcome.codes,
        changed=int(outcome.changed.sum()),
        remarks=(*outcome.remarks, *_sharing(model, layer)),
    )
    fold = GridFold(scale, shift)
    edit = FoldEdit({path: fold}, paths_of(model, norm), None, fusion)
    return Trial(pair, layer, folded, outcome, fold, edit)


def _sharing(model: nn.Module, layer: nn.Module) -> list[str]:
    """Return remarks about what the layer does not share any more."""
    slot = weight_slot(layer)
    shared = {
        "weight": layer.get_parameter("weight"),
        "quantizer of its weight": None if slot is None else layer.get_submodule(slot),
    }
    remarks = []
    for what, part in shared.items():
        holders = [] if part is None else holders_of(model, part, layer)
        if holders:
            remarks.append(f"has a {what} of its own now, beside {', '.join(holders)}")
    return remarks


def _compare_in_model(
    model: nn.Module, trials: Sequence[Trial], example: object
) -> None:
    """Run the model once, and every folded copy on what its layer gets there."""
    watched = [(t.layer, partial(_see, t)) for t in trials if t.outcome.has_range]
    with evaluating(model), torch.no_grad(), random_seeded(0), watching(watched):
        call_model(model, copy.deepcopy(example))


def _see(trial: Trial, args: Any, kwargs: Any, result: Any) -> None:
    """Compare a copy with its layer on the arguments of one call, past hooks."""
    _compare_call(trial, trial.folded, result, *args, **kwargs)


def _compare_call(
    trial: Trial, folded: Any, result: Any, *args: Any, **kwargs: Any
) -> None:
    """Compare what a folded layer returns with the result of the layer, times factor plus shift."""
    try:
        got = folded.forward(*args, **kwargs)
        sizes = [-1, *[1] * _dims_behind_channels(trial.layer)]
        scale, shift = (
            t.reshape(sizes).to(result.device)
            for t in (trial.fold.scale, trial.fold.shift)
        )
        want = result.double() * scale + shift
        trial.compare(*(_channels_first(trial.layer, t) for t in (got, want)))
    except Exception as failure:  # a forward of the user's may do anything
        trial.failure = failure


def _compare_on_random(trial: Trial) -> None:
    """Compare a copy with its layer on random numbers, in the precision of the layer.

    In another one a weight on a tie may have another code.
    """
    layer, folded = trial.layer, trial.folded
    if not trial.outcome.has_range:
        layer, folded = copy_module(layer), copy_module(folded)
        for part in (layer, folded):
            slot = weight_slot(part)
            if slot is not None:
                part.add_module(slot, nn.Identity())
    x = sample(layer, torch.Generator().manual_seed(0)).to(layer.weight)
    with torch.no_grad():
        try:
            result = layer.forward(x)
        # A forward of the user's may want more than one tensor.
        except Exception as failure:
            trial.failure = failure
            return
        _compare_call(trial, folded, result, x)


def _compare_norm(trial: Trial, norm: nn.Module) -> None:
    """Compare a BatchNorm of no class of torch with its factor and shift, in float64."""
    norm = copy_module(norm)
    if hasattr(norm, "act"):  # it stays
        norm.act = nn.Identity()
    channels = len(trial.fold.scale)
    x = torch.randn(
        3, channels, *[2] * _dims_behind_channels(trial.layer), dtype=torch.float64
    )
    sizes = [-1, *[1] * (x.dim() - 2)]
    try:
        got = run([norm], x).reshape(x.shape)
        error = relative_error(
            got, x * trial.fold.scale.reshape(sizes) + trial.fold.shift.reshape(sizes)
        )
    except Exception as failure:  # a forward of the user's may do anything
        trial.failure = failure
        return
    if not error <= TOLERANCE:
        trial.failure = ValueError(
            f"its result is off by {error:.1e} from that of a BatchNorm"
        )


def _dims_behind_channels(layer: Any) -> int:
    return 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)


def _channels_first(layer: object, result: Tensor) -> Tensor:
    """Return a result with its output channels on axis 0."""
    return result.movedim(-1 - _dims_behind_channels(layer), 0)
