"""How a BatchNorm and its layer are found: traced, recorded, in parts, through wrappers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.mobile import LinearNorm
from tests.fusion.common import Net, data_dependent, fused_exactly, image, randomized
from torchq.fusion import fuse_


@pytest.mark.parametrize("functional", [False, True])
def test_models_that_cannot_be_traced_are_recorded(functional: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = (
            F.conv2d(x, m.conv.weight, m.conv.bias, padding=1)
            if functional
            else m.conv(x)
        )
        y = m.bn(y)
        return y * y.shape[0] if x.abs().max() > 0.1 else y

    model = randomized(Net(forward).double())
    x = image()
    without = fuse_(copy.deepcopy(model))
    assert without.fused == ()
    assert "Give an example to see the whole" in without.notes[0]
    report = fused_exactly(model, x, x)
    assert report.fused[0].found_by == "recorder"
    assert report.notes[0].startswith(
        "its code decides by the values of tensors, so a run"
    )


@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_asking_for_the_type_of_a_weight_is_not_reading_it(traceable: bool) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return (
            m.bn(m.conv(x.to(m.conv.weight.dtype).to(m.conv.bias)))
            * m.conv.weight.shape[0]
        )

    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    x = image()
    assert len(fused_exactly(model, x, x).fused) == 1


def test_traceable_parts_of_an_untraceable_model_are_folded_without_an_example() -> (
    None
):
    model = Net(data_dependent(lambda m, x: m.other(x)))
    model.other = nn.Sequential(
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
    )  # type: ignore[assignment]
    assert fused_exactly(randomized(model.double()), image()).fused[0].name == "other.0"


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 3, 5, 6)])
def test_linear_and_batchnorm_with_the_features_moved(shape: tuple[int, ...]) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.other(x)
        return m.bn(y.permute(0, 3, 1, 2) if len(shape) == 4 else y.flatten(0, 1))

    model = Net(forward)
    x = image(*shape)
    model.other = nn.Linear(6, 4)  # type: ignore[assignment]
    model.bn = model.bn if len(shape) == 4 else nn.BatchNorm1d(4)  # type: ignore[assignment]
    assert fused_exactly(randomized(model.double()), x, x).applied


@pytest.mark.parametrize("like", ["reshape_as", "view_as", "zeros_like"])
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_reading_only_the_shape_of_a_result_is_not_using_it(
    like: str, traceable: bool
) -> None:
    class Tokens(LinearNorm):
        def forward(self, x: Tensor) -> Any:
            if not traceable and float(x.sum()) > 1e9:
                return x
            x = self.linear(x)
            y = self.bn(x.flatten(0, 1))
            is_zeros = like == "zeros_like"
            return (
                y.view(torch.zeros_like(x).shape) if is_zeros else getattr(y, like)(x)
            )

    model = randomized(Tokens(6, 4).double())
    x = image(2, 5, 6)
    assert fused_exactly(model, x, x).require_all().applied


def test_layer_with_its_norm_inside() -> None:
    class Wrapper(nn.Conv2d):
        """detectron2's Conv2d."""

        def __init__(self) -> None:
            super().__init__(4, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.activation = F.relu

        def forward(self, x: Tensor) -> Any:
            x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding)
            return self.activation(self.norm(x))

    model = randomized(nn.Sequential(Wrapper(), nn.MaxPool2d(2)).double())
    x = image()
    assert fused_exactly(model, x, x).fused[0].parts == ("0.norm",)


def test_convolution_with_a_forward_of_its_own_is_folded_only_if_that_is_right() -> (
    None
):
    class Same(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            return self._conv_forward(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias)

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Any:
            weight = (self.weight - self.weight.mean()) / self.weight.std()
            return self._conv_forward(x, weight, self.bias)

    for cls, fused in ((Same, 1), (Standardized, 0)):
        model = randomized(nn.Sequential(cls(4, 6, 2), nn.BatchNorm2d(6)).double())
        report = fuse_(model, verify=False)
        assert len(report.fused) == fused
    assert "folding it into 0 would be off by" in report.reason("1")


def plain(cls: type[nn.Module]) -> Any:
    """Return a subclass without anything of its own."""
    return type(f"Plain{cls.__name__}", (cls,), {})


class Doubles(nn.Dropout):
    def forward(self, x: Tensor) -> Any:
        return 2 * x


class Shifts(nn.Identity):
    def forward(self, x: Tensor) -> Any:
        return x + 1


class Transposes(nn.ReLU):
    def forward(self, x: Tensor) -> Any:
        return x[:, :, None].expand(-1, -1, 4)


def test_a_subclass_without_a_forward_of_its_own_is_its_base() -> None:
    between = plain(nn.Identity)(), plain(nn.Dropout2d)(), plain(nn.BatchNorm2d)(4)
    behind = (
        plain(nn.ConvTranspose2d)(4, 2, 2),
        plain(nn.BatchNorm2d)(2),
        plain(nn.Flatten)(),
    )
    last = plain(nn.Linear)(50, 4), nn.BatchNorm1d(4)
    model = nn.Sequential(plain(nn.Conv2d)(4, 4, 3), *between, *behind, *last)
    report = fused_exactly(randomized(model.double()), image()).require_all()
    assert len(report.fused) == 3


@pytest.mark.parametrize("between", [Doubles, Shifts])
def test_a_subclass_with_a_forward_of_its_own_is_not_its_base(
    between: type[nn.Module],
) -> None:
    model = randomized(
        nn.Sequential(nn.Conv2d(4, 4, 3), between(), nn.BatchNorm2d(4)).double()
    )
    report = fused_exactly(model, image())
    assert report.fused == ()
    assert (
        "its input comes from 1, not from a convolution or linear layer"
        in report.reason("2")
    )


def test_an_activation_with_a_forward_of_its_own_may_change_the_dimensions() -> None:
    layers = [nn.Flatten(), Transposes(), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    model = randomized(nn.Sequential(*layers).double())
    report = fused_exactly(model, image(2, 4))
    assert "the dimensions of its result are unknown" in report.reason("3")
