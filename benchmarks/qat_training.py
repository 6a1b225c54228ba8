"""The training loop of the QAT benchmarks: an ordinary one, with a cosine and a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import torchq
from torchq.utils import progress_bar

__all__ = ["Training", "fit"]


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
    """

    steps: int
    lr: float
    optimizer: str = "sgd"
    weight_decay: float = 1e-4
    clip: float | None = None
    seed: int = 0


def fit(
    model: nn.Module,
    loss: Callable[[torch.Generator], Tensor],
    training: Training,
    *,
    after: Callable[[int], object] | None = None,
    label: str = "train",
) -> nn.Module:
    """Train ``model`` in place and return it in eval mode.

    Args:
        model: what is trained; ``loss`` holds it too.
        loss: draws a batch with the generator and returns its loss.
        training: how long and how fast.
        after: called with the number of each step after it.
        label: the text of the progress bar.
    """
    generator = torch.Generator().manual_seed(training.seed)
    torch.manual_seed(training.seed)
    groups = torchq.qat.param_groups(model, lr=training.lr, weight_decay=training.weight_decay)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(groups, momentum=0.9)
        if training.optimizer == "sgd"
        else torch.optim.AdamW(groups)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, training.steps)
    model.train()
    for step in progress_bar(range(training.steps), description=label, unit="step"):
        optimizer.zero_grad()
        loss(generator).backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        schedule.step()
        if after is not None:
            after(step)
    return model.eval()
