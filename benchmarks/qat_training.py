"""The training loop of the QAT benchmarks: an ordinary one, with a cosine and a progress bar.

A run that is stopped continues where it was, bit for bit, from its last checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.utils import progress_bar

__all__ = ["Training", "fit"]

#: Steps between two checkpoints.
_EVERY = 20


@dataclass(frozen=True)
class Training:
    """How long and how fast to train.

    Args:
        steps: the number of training steps.
        lr: the learning rate at the start; a cosine brings it to 0.
        optimizer: ``"sgd"`` (with momentum 0.9) or ``"adam"``.
        weight_decay: of weights; biases, norms and ranges have none.
        clip: the largest norm of all gradients together, or None.
        seed: of the batches.
        range_lr: the learning rate of learned ranges, or None for ``lr``.
        input_range_lr: that of ranges of activations, or None for ``range_lr``.
    """

    steps: int
    lr: float
    optimizer: str = "sgd"
    weight_decay: float = 1e-4
    clip: float | None = None
    seed: int = 0
    range_lr: float | None = None
    input_range_lr: float | None = None


def fit(
    model: nn.Module,
    loss: Callable[[torch.Generator], Tensor],
    training: Training,
    *,
    before: Callable[[int], object] | None = None,
    after: Callable[[int], object] | None = None,
    label: str = "train",
    checkpoint: Path | None = None,
    extras: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Train ``model`` in place and return it in eval mode.

    Args:
        model: what is trained; ``loss`` holds it too.
        loss: draws a batch with the generator and returns its loss.
        training: how long and how fast.
        before: called with the number of each step before it.
        after: called with the number of each step after it.
        label: the text of the progress bar.
        checkpoint: a file for the state of the run, which is removed at the end.
        extras: further objects with a state dict that belong to the run, by name.
    """
    generator = torch.Generator().manual_seed(training.seed)
    torch.manual_seed(training.seed)
    optimizer = _optimizer(model, training)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, **(extras or {})}
    first = _resume(checkpoint, parts, generator)
    model.train()
    for step in progress_bar(range(first, training.steps), description=label, unit="step"):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        loss(generator).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        if after is not None:
            after(step)
        if checkpoint is not None and step % _EVERY == _EVERY - 1:
            _keep(checkpoint, parts, generator, step + 1)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return model.eval()


def _optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    groups = torchq.qat.param_groups(
        model,
        lr=training.lr,
        weight_decay=training.weight_decay,
        range_lr=training.range_lr,
        input_range_lr=training.input_range_lr,
    )
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=0.9)
        if training.optimizer == "sgd"
        else torch.optim.AdamW(groups)
    )
    return optimizer


def _keep(path: Path, parts: Mapping[str, Any], generator: torch.Generator, steps: int) -> None:
    """Write the state of a run after a number of steps; the file is replaced whole."""
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**state, "generator": generator.get_state(), "steps": steps}, f"{path}.part")
    os.replace(f"{path}.part", path)


def _resume(path: Path | None, parts: Mapping[str, Any], generator: torch.Generator) -> int:
    """Load the state of a run if there is one; return how many steps are done."""
    if path is None or not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    generator.set_state(state["generator"])
    done: int = state["steps"]
    return done
