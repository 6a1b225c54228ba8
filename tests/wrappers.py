"""Wrappers of torch around a whole model, which functions of torchq look through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

__all__ = ["WRAPPERS", "one_process"]


def _never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("the model was compiled")


def _compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend=_never)


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend=_never)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": DistributedDataParallel,
    "AveragedModel": lambda model: AveragedModel(model, use_buffers=True),
    "compile": _compiled,
    "compile in place": _compiled_in_place,
    "both": lambda model: _compiled(DistributedDataParallel(model)),
}


@pytest.fixture
def one_process() -> Iterator[None]:
    """Be the one process of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
