"""Parameter groups for quantization-aware training."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.workflow import quantizers

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module, *, lr: float, weight_decay: float = 0.0, range_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimizer groups that treat learned ranges, weights, and biases and norms apart.

    Weight decay would pull a learned range towards zero, that is, towards clipping everything; and a range wants a learning
    rate of its own scale.

    Args:
        model: a model, quantized or not.
        lr, weight_decay: for parameters of two and more dimensions; smaller ones (biases, norms) get no decay.
        range_lr: for learned ranges; default ``lr``.

    Returns:
        up to three groups named ``weights``, ``biases_and_norms``, ``ranges`` for any ``torch.optim`` optimizer. Parameters
        without gradient are left out.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> _ = torchq.quantize_(model, torchq.recipes.w4a4())
        >>> [(g["name"], len(g["params"])) for g in param_groups(model, lr=0.1)]
        [('weights', 1), ('biases_and_norms', 1), ('ranges', 2)]
    """
    learned = {id(q.amax) for q in quantizers(model).values()}
    groups: dict[str, dict[str, Any]] = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "biases_and_norms": {"lr": lr, "weight_decay": 0.0},
        "ranges": {"lr": lr if range_lr is None else range_lr, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = (
                "ranges"
                if id(parameter) in learned
                else "weights"
                if parameter.dim() > 1
                else "biases_and_norms"
            )
            members[kind].append(parameter)
    return [
        {"name": name, "params": params, **groups[name]}
        for name, params in members.items()
        if params
    ]
