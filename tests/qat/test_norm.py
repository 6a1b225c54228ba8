"""Frozen and re-estimated BatchNorm."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import torchq
from torchq.errors import ConfigError
from torchq.qat import freeze_bn_, reestimate_bn_, unfreeze_bn_

NORMS = [
    (nn.BatchNorm1d, (6, 3, 5)),
    (nn.BatchNorm2d, (6, 3, 4, 4)),
    (nn.BatchNorm3d, (6, 3, 2, 4, 4)),
]


@pytest.mark.parametrize(
    ("norm", "shape"), NORMS, ids=lambda v: getattr(v, "__name__", "")
)
def test_frozen_norm_survives_train_and_uses_its_statistics(
    norm: type[nn.Module], shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(norm(3, eps=1e-3, momentum=0.03))
    nn.init.normal_(model[0].running_mean)
    expected = copy.deepcopy(model).eval()
    keys = set(model.state_dict())
    freeze_bn_(model)
    model.train()
    x = torch.randn(shape)
    before = model[0].running_mean.clone()
    assert torch.equal(model(x), expected(x))
    assert torch.equal(model[0].running_mean, before)
    assert (model[0].eps, model[0].momentum) == (1e-3, 0.03)
    assert isinstance(model[0], norm)
    assert set(model.state_dict()) == keys
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert not twin.train()[0].training


def test_unfreezing_gives_the_class_and_the_mode_of_the_model_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU()).train()
    assert freeze_bn_(model) == ("0",)
    assert freeze_bn_(model) == ()
    assert unfreeze_bn_(model) == ("0",)
    assert type(model[0]) is nn.BatchNorm1d
    before = model[0].running_mean.clone()
    model(torch.randn(8, 2) + 3)
    assert not torch.equal(model[0].running_mean, before)


def test_reestimated_statistics_are_the_average_over_batches() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5)).train()
    batches = [torch.randn(16, 3) * (i + 1) + i for i in range(4)]
    assert reestimate_bn_(model, batches, progress=False) == 4
    mean = torch.stack([b.mean(0) for b in batches]).mean(0)
    variance = torch.stack([b.var(0) for b in batches]).mean(0)
    torch.testing.assert_close(model[0].running_mean, mean)
    torch.testing.assert_close(model[0].running_var, variance)
    assert model[0].momentum == 0.1
    assert model[1].training


def test_a_batch_with_labels_changes_the_statistics_alone() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
    )
    torchq.quantize_(model)
    before = copy.deepcopy(model.state_dict())
    reestimate_bn_(model, [(torch.randn(4, 1, 6, 6), torch.zeros(4))], progress=False)
    actual = model.state_dict()
    changed = {
        key for key, value in actual.items() if not torch.equal(value, before[key])
    }
    assert changed == {
        f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }


def test_reestimate_errors() -> None:
    with pytest.raises(
        ConfigError, match="Linear has no BatchNorm with running statistics"
    ):
        reestimate_bn_(
            nn.Linear(1, 1),
            [torch.ones(1, 1)],
        )
    model = nn.Sequential(nn.BatchNorm1d(2))
    nn.init.constant_(model[0].running_mean, 5.0)
    with pytest.raises(ConfigError, match="got no batch"):
        reestimate_bn_(model, [], progress=False)
    assert torch.equal(
        model[0].running_mean,
        torch.full((2,), 5.0),
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_reestimate_changes_nothing(error: type[BaseException]) -> None:
    def interrupted() -> Iterator[torch.Tensor]:
        yield torch.randn(4, 2) + 9
        raise error

    model = nn.Sequential(nn.BatchNorm1d(2))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(error):
        reestimate_bn_(model, interrupted(), progress=False)
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )
    assert model[0].momentum == 0.1
