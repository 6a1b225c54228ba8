"""Clipping with learned bounds."""

from __future__ import annotations

import pytest
import torch

from torchq.compat.pytorch_quantization.nn import Clip
from torchq.compat.pytorch_quantization.nn import functional as QF


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_clip_values_and_gradients() -> None:
    x = draw(3, 100)
    x[0, 0], x[0, 1] = -0.3, 0.7  # the bounds themselves count as clipped
    x.requires_grad_()
    low, high = torch.tensor(-0.3, requires_grad=True), torch.tensor(0.7, requires_grad=True)
    weight = draw(3, 100, seed=1)
    (QF.clip(x, low, high) * weight).sum().backward()
    torch.testing.assert_close(low.grad, weight[x <= low].sum())
    torch.testing.assert_close(high.grad, weight[x >= high].sum())
    assert x.grad.equal(weight * ((x > low) & (x < high)))
    rows = torch.tensor([[0.1], [0.2], [0.3]])
    assert QF.clip(x, -rows, rows).equal(torch.minimum(torch.maximum(x, -rows), rows))
    with pytest.raises(ValueError, match="can only be scalar"):
        QF.clip(x, (-rows).requires_grad_(), rows).sum().backward()


def test_clip_module() -> None:
    x = draw(50)
    assert Clip(torch.tensor(0.3), torch.tensor(0.7))(x).equal(x.clamp(0.3, 0.7))
    assert list(Clip(0.3, 0.7).state_dict()) == []
    learned = Clip(0.3, 0.7, learn_min=True, learn_max=True)
    assert list(learned.state_dict()) == ["clip_value_min", "clip_value_max"]
    learned.disable()
    assert learned(x) is x
    learned.enable()
    assert learned(x).equal(x.clamp(0.3, 0.7))
    with pytest.raises(ValueError, match="must be scalar"):
        Clip(torch.tensor(0.3), torch.tensor(0.7), learn_min=True)
