"""The passes of ``fuse_``, and the order in which they run.

A pass is a function that finds merges in a trial copy of the model, carries them out on the copy,
notes them as edits, and returns how many there were. Its docstring states what it expects
(Before) and what it leaves (After). The real model is changed once, by the edits, at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torchq.fusion.blocks import BlockEdit, plan_blocks
from torchq.fusion.fold import FoldEdit, plan_fold
from torchq.fusion.modules import is_norm
from torchq.fusion.pairs import find_flow, find_pairs
from torchq.fusion.report import Refusal
from torchq.utils import progress_bar

_MOST_ROUNDS = 4  # a layer between two BatchNorms absorbs one in each round


#: A planned change: it has a row of the report (``fusion``), is applied to the model and to copies
#: of it (``apply``), and is told as JSON data (``record``).
Edit = FoldEdit | BlockEdit


@dataclass
class Trial:
    """A copy of the model that passes change, the options, and what was found, some by path."""

    model: nn.Module
    example: Any = None
    verify: bool = True
    constant_pad: bool = False
    progress: bool = False
    edits: list[Edit] = field(default_factory=list)
    refused: dict[str, Refusal] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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

    def bar(self, items: Sequence[Any], description: str) -> Any:
        """Iterate over ``items`` behind a progress bar that appears after a second."""
        return progress_bar(items, description=description, enabled=self.progress, unit="module")


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
        if trial.edits and trial.verify:  # the comparison of the whole model will report it
            return 0
        raise
    pairs, refusals = find_pairs(trial.model, flow, constant_pad=trial.constant_pad)
    modules = dict(trial.model.named_modules(remove_duplicate=False))
    for name in [name for name in trial.refused if is_norm(modules.get(name))]:
        del trial.refused[name]  # it has just been looked at again
    trial.notes = list(notes)
    bar = trial.bar(pairs, "fold BatchNorm")
    planned = [plan_fold(trial.model, pair, verify=trial.verify) for pair in bar]
    return trial.carry_out([*planned, *refusals])


#: The passes in their order: a BatchNorm inside a block goes with the block.
PASSES: tuple[Pass, ...] = (merge_known_blocks, fold_batchnorms)


def run_passes(trial: Trial, passes: Sequence[Pass] = PASSES) -> None:
    """Run passes on a trial, one after the other, each until it finds nothing."""
    for merge in passes:
        for _ in range(_MOST_ROUNDS):
            if not merge(trial):
                break
