"""Parameter groups for quantization-aware training."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchq.workflow import quantizers, weight_quantizers

__all__ = ["param_groups"]


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    range_lr: float | None = None,
    input_range_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Return optimizer groups for weights, for biases and norms, and for learned ranges.

    Weight decay would pull a learned range towards zero, where it clips everything, and a range
    needs a learning rate of its own.

    Args:
        model: a model, quantized or not.
        lr: the learning rate of all parameters but the ranges.
        weight_decay: of parameters with two or more dimensions; the others (biases, norms) and
            the ranges have none.
        range_lr: the learning rate of learned ranges; None takes ``lr``.
        input_range_lr: the learning rate of those ranges that are not of weights, which get a group
            of their own, ``input_ranges``. None takes ``range_lr``, in the group ``ranges``.

    Returns:
        Up to four groups named ``weights``, ``biases_and_norms``, ``ranges`` and ``input_ranges``
        for any ``torch.optim`` optimizer. Parameters without gradient are left out.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        >>> _ = torchq.quantize_(model, torchq.recipes.w4a4())
        >>> [(g["name"], len(g["params"])) for g in param_groups(model, lr=0.1)]
        [('weights', 3), ('biases_and_norms', 3), ('ranges', 2)]
    """
    of_weights = weight_quantizers(model)
    names = {
        id(end): "ranges" if input_range_lr is None or id(q) in of_weights else "input_ranges"
        for q in quantizers(model).values()
        for end in q.parameters(recurse=False)
    }
    groups: dict[str, dict[str, Any]] = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "biases_and_norms": {"lr": lr, "weight_decay": 0.0},
        "ranges": {"lr": lr if range_lr is None else range_lr, "weight_decay": 0.0},
        "input_ranges": {"lr": input_range_lr, "weight_decay": 0.0},
    }
    members: dict[str, list[nn.Parameter]] = {name: [] for name in groups}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in names:
            members[names[id(parameter)]].append(parameter)
        elif parameter.dim() > 1:
            members["weights"].append(parameter)
        else:
            members["biases_and_norms"].append(parameter)
    return [
        {"name": name, "params": params, **groups[name]}
        for name, params in members.items()
        if params
    ]
