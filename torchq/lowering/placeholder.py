"""A parameter without elements for deployed models, which have no others.

Code around models asks the first parameter for the type and the device of inputs:
``next(model.parameters()).dtype``. It is frozen, and state dicts and files do not have it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.graph import floats_in

#: The name of the parameter.
PLACEHOLDER = "torchq_placeholder"


def placeholder_for(model: nn.Module, example: object) -> Tensor:
    """Return a tensor without elements, of the type and device of the inputs of a model."""
    floats = [*floats_in(example), *floats_in(list(model.parameters()))]
    if not floats:
        return torch.empty(0, device="cpu", dtype=torch.float32)
    return torch.empty(0, device=floats[0].device, dtype=floats[0].dtype)


def add_placeholder_(model: nn.Module, like: Tensor) -> None:
    """Give a model that has no parameter one without elements, in place."""
    if any(True for _ in model.parameters()):
        return
    model.register_parameter(PLACEHOLDER, nn.Parameter(like, requires_grad=False))
    model.register_state_dict_post_hook(_leave_out)
    model.register_load_state_dict_pre_hook(_add)


def carry_placeholder_(source: nn.Module, destination: nn.Module) -> None:
    """Give a copy of a model the parameter that torch leaves out of copies of graphs."""
    parameter = dict(source.named_parameters(recurse=False)).get(PLACEHOLDER)
    if parameter is not None:
        add_placeholder_(destination, parameter.detach())


def _leave_out(
    module: nn.Module, state: dict[str, object], prefix: str, metadata: object
) -> None:
    state.pop(prefix + PLACEHOLDER, None)


def _add(
    module: nn.Module, state: dict[str, object], prefix: str, *args: object
) -> None:
    state[prefix + PLACEHOLDER] = module.get_parameter(PLACEHOLDER).detach()
