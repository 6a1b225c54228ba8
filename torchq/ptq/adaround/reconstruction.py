"""The reconstruction of one block: its quantized output becomes that of the float block.

References: Li et al., BRECQ: Pushing the Limit of Post-Training Quantization by Block
Reconstruction (ICLR 2021), algorithm 1. The target is the output of the float block on the float
input (asymmetric reconstruction).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchq.errors import CalibrationError
from torchq.graph import tensors_in
from torchq.ptq.adaround.learned_block import LearnedBlock, biases_learned
from torchq.ptq.adaround.soft_rounding import decision_penalty, rectified_sigmoid
from torchq.ptq.blockwise import map_tensors
from torchq.ptq.ranks import Group, all_sums
from torchq.utils import device_of

__all__ = ["BlockData", "Settings", "learn", "mean_error"]

# Learning rates of Adam and the weight of the penalty, as in BRECQ, but for the first one: 0.02
# decides roundings in a few hundred steps.
_RATE_WEIGHTS, _RATE = 2e-2, 1e-3
_PENALTY = 0.01
# The penalty begins after a fifth of the steps; its exponent falls from 20 to 2.
_WARMUP, _BETA_START, _BETA_END = 0.2, 20.0, 2.0


@dataclass(frozen=True)
class Settings:
    """How a block is learned.

    Attributes:
        steps: training steps.
        rows: of a batch, in one step.
        group: processes that learn together.
    """

    steps: int
    rows: int
    group: Group = None


@dataclass(frozen=True)
class BlockData:
    """The inputs and outputs of a block on every batch.

    Attributes:
        count: the number of batches.
        inputs: index of a batch -> ``(args, kwargs)`` from the quantized blocks before.
        target: index of a batch -> the output of the float block.
    """

    count: int
    inputs: Callable[[int], Any]
    target: Callable[[int], Any]


def output_error(out: Any, target: Any) -> Tensor:
    """Return the squared error, summed over channels and averaged over everything else."""
    pairs = [
        (o, t)
        for o, t in zip(tensors_in(out), tensors_in(target), strict=True)
        if t.is_floating_point()
    ]
    total = torch.zeros((), device="cpu")
    for o, t in pairs:
        channels = t.shape[1] if t.dim() > 3 else t.shape[-1] if t.dim() else 1
        total = total.to(o.device) + (o - t).square().mean() * channels
    return total


def learn(
    name: str,
    learned: LearnedBlock,
    data: BlockData,
    settings: Settings,
    generator: torch.Generator,
) -> None:
    """Learn roundings, ranges and biases of a block.

    Args:
        name: its path, for error texts.
        learned: changed in place; the weights of the block are not.
        data: its inputs and outputs.
        settings: steps and rows.
        generator: of the random choices.

    Raises:
        CalibrationError: the loss is NaN or infinite.
    """
    weights = [soft.v for soft in learned.weights.values()]
    groups: list[dict[str, Any]] = [
        {"params": weights, "lr": _RATE_WEIGHTS},
        {"params": learned.others(), "lr": _RATE},
    ]
    with torch.enable_grad(), biases_learned(learned.biases):
        parameters = [parameter for group in groups for parameter in group["params"]]
        # Steps of 16-bit values would be rounded away, and their squares would be 0.
        exact = [_in_float32(parameter) for parameter in parameters]
        optimizer = _adam(groups, exact)
        for number in range(settings.steps):
            optimizer.param_groups[1]["lr"] = _RATE * _cosine(number, settings.steps)
            loss = _loss(learned, data, settings, number, generator)
            (total,) = all_sums([loss.detach()], settings.group)
            if not bool(total.isfinite()):
                raise CalibrationError(
                    f"adaround_: {name}: the error became NaN or infinite after {number} "
                    "steps; expected finite inputs and outputs. The block keeps its former weights"
                )
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for copy, gradient in zip(exact, gradients, strict=True):
                copy.grad = _averaged(gradient, copy, settings.group)
            optimizer.step()
            for parameter, copy in zip(parameters, exact, strict=True):
                parameter.detach().copy_(copy)


def _adam(groups: list[dict[str, Any]], parameters: list[Tensor]) -> torch.optim.Adam:
    """Return the optimizer of ``groups`` with other parameters, as many and in the same order."""
    rest = iter(parameters)
    return torch.optim.Adam(
        [{**group, "params": list(islice(rest, len(group["params"])))} for group in groups]
    )


def _in_float32(parameter: Tensor) -> Tensor:
    """Return the values of a parameter in float32 at least: its own memory, or else a copy."""
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))


def _averaged(gradient: Tensor | None, parameter: Tensor, group: Group) -> Tensor | None:
    """Return the mean gradient over the processes of ``group``, in the dtype of the parameter."""
    if group is None:
        return None if gradient is None else gradient.to(parameter.dtype)
    own = torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
    (total,) = all_sums([own], group)
    return total / dist.get_world_size(group)


def _loss(
    learned: LearnedBlock,
    data: BlockData,
    settings: Settings,
    number: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the loss of one step: the error of some rows, and the penalty."""
    (args, kwargs), target = _some_rows(data, settings, generator)
    out = learned.run(args, kwargs)
    loss = output_error(out, target)
    progress = (number / settings.steps - _WARMUP) / (1 - _WARMUP)
    if progress >= 0:
        beta = _BETA_START + (_BETA_END - _BETA_START) * progress
        for soft in learned.weights.values():
            loss = loss + _PENALTY * decision_penalty(rectified_sigmoid(soft.v), beta)
    return loss


def _some_rows(data: BlockData, settings: Settings, generator: torch.Generator) -> tuple[Any, Any]:
    """Return the inputs and the target of random rows of a random batch."""
    index = int(torch.randint(data.count, (), generator=generator, device="cpu"))
    inputs, target = data.inputs(index), data.target(index)
    first = next((t for t in tensors_in(inputs) if t.dim()), None)
    if first is None or len(first) <= settings.rows:
        return inputs, target
    order = torch.randperm(len(first), generator=generator, device="cpu")
    rows = order[: settings.rows].to(first.device)

    def choose(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == len(first) else tensor

    return map_tensors(inputs, choose), map_tensors(target, choose)


def _cosine(number: int, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * number / steps))


def mean_error(block: Any, data: BlockData, settings: Settings) -> float:
    """Return the error of the block as it is now, over all batches of all processes."""
    errors = []
    for index in range(data.count):
        args, kwargs = data.inputs(index)
        errors.append(output_error(block(*args, **kwargs), data.target(index)).item())
    sums = torch.tensor([sum(errors), len(errors)], dtype=torch.float64, device="cpu")
    (found,) = all_sums([sums.to(device_of(block))], settings.group)
    return (found[0] / found[1]).item()
