"""Zeros of a pruned network stay zeros through swap, training and fusing."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import torchq
from torchq.qat import prepare


def two_of_four(weight: Tensor) -> Tensor:
    """Return a mask that keeps the two largest of four neighbours along the inputs."""
    groups = weight.detach().abs().flatten(1).reshape(-1, 4)
    mask = torch.zeros_like(groups).scatter(-1, groups.topk(2, -1).indices, 1.0)
    return mask.reshape(weight.shape)


def pruned() -> tuple[Any, dict[str, Tensor]]:
    """Return a network with 2:4 masks, which torch's hooks apply, and the masks."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 4),
    )
    masks = {name: two_of_four(model.get_submodule(name).weight) for name in ("0", "4")}
    for name, mask in masks.items():
        prune.custom_from_mask(model.get_submodule(name), "weight", mask)
    return model, masks


def images() -> Tensor:
    return torch.randn(16, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def assert_sparse(model: nn.Module, masks: dict[str, Tensor]) -> None:
    for name, mask in masks.items():
        layer: Any = model.get_submodule(name)
        quantized = layer.weight_quantizer(layer.weight)
        assert bool((quantized[mask == 0] == 0).all()), name
        kept = (quantized != 0).flatten(1).reshape(-1, 4).sum(-1)
        assert int(kept.max()) <= 2
        assert int((kept == 2).sum()) > len(kept) // 4


def train(model: nn.Module, groups: Any, steps: int = 8) -> None:
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    labels = torch.arange(16) % 4
    for _ in range(steps):
        loss = nn.functional.cross_entropy(model.train()(images()), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Fixed, learned.
RECIPES = [
    torchq.recipes.integer(4, 8),
    torchq.recipes.w4a4(first_last=None),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_masks_of_hooks_survive_training_and_zeros_stay_through_fusing(
    recipe: torchq.QuantConfig,
) -> None:
    model, masks = pruned()
    before = model[0].weight_orig.detach().clone()
    done = prepare(model, [images()], recipe, progress=False)
    assert_sparse(model, masks)
    train(model, done.param_groups)
    assert not torch.equal(model[0].weight_orig, before)
    model.eval()(images())  # The hook computes the weight before each forward.
    assert_sparse(model, masks)
    for name in masks:
        prune.remove(model.get_submodule(name), "weight")
    torchq.fuse_(model, images(), progress=False)
    assert isinstance(model[1], nn.Identity)
    assert_sparse(model, masks)
