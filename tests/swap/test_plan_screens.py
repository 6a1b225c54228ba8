"""What a printed plan shows of large networks."""

import torch
from torch import Tensor, nn

import torchq


class Dense(nn.Module):
    """Each layer reads all that came before it, as in a DenseNet."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(4 * i + 4, 4, 1) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)).relu())
        return torch.cat(features, 1)


class Stages(nn.Sequential):
    """Dense stages behind each other, of other lengths."""

    def __init__(self) -> None:
        stages = []
        for layers in (9, 7, 5):
            last = nn.Conv2d(4 * layers + 4, 4, 1)
            stages += [Dense(layers), last]
        super().__init__(*stages)


def test_numbers_of_ranges_are_one_row_of_a_screen() -> None:
    plan = torchq.plan(
        Stages().eval(), target="onnxruntime", example=torch.rand(2, 4, 6, 6)
    )
    numbers = {d.ranges for d in plan.replaced}
    assert len(numbers) > 5
    screen = str(plan)
    assert screen.count("(a range each)") == 1
    assert "more kinds of decisions" not in screen
    assert len(screen.splitlines()) < 25
