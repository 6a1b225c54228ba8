"""What must not be folded is refused by name and with its reason, and left as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fuse import zoo_rest
from tests.fuse.common import error, outputs, randomized
from torchq.errors import FuseError
from torchq.fuse import fuse_


class Net(nn.Module):
    """One convolution and one BatchNorm, with a forward given as a function."""

    def __init__(self, forward, channels=4):
        super().__init__()
        self.run, self.conv, self.bn = forward, nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.other = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        return self.run(self, x)


def data_dependent(forward):
    """The same model for a tracer that cannot follow it."""

    def run(m, x):
        return forward(m, x) if float(x.sum()) < 1e9 else x

    return run


def two_consumers(m, x):
    y = m.conv(x)
    return m.bn(y) + y.relu()


def graph_output(m, x):
    y = m.conv(x)
    return m.bn(y), y


def shared_norm(m, x):
    return m.bn(m.conv(x)) + m.bn(m.other(x))


def shared_conv(m, x):
    return m.bn(m.conv(x)) + m.conv(x + 1)


def changed_in_place(m, x):
    y = m.conv(x)
    y += 1
    return m.bn(y)


def not_a_layer(m, x):
    return m.bn(torch.relu(m.conv(x)))


def weight_read(m, x):
    return m.bn(m.conv(x)) + m.conv.weight.abs().mean()


def without_bias(m, x):
    return m.bn(F.conv2d(x, m.conv.weight, padding=1))


def foreign_bias(m, x):
    return m.bn(F.conv2d(x, m.conv.weight, bias=m.other.bias))


def own_padding(m, x):
    return F.conv2d(m.bn(x), m.other.weight, m.other.bias, padding=1)


def shift_read(m, x):
    return m.bn(m.conv(x)) - m.bn.bias.sum()


def unused(m, x):
    return m.conv(x)


FORWARDS = {
    "two consumers": (two_consumers, "conv has 2 consumers: bn, relu"),
    "graph output": (graph_output, "conv is also an output of the model"),
    "shared norm": (shared_norm, "is shared: it follows conv, other"),
    "shared conv": (shared_conv, "its layer conv is shared: it is also called without this BatchNorm"),
    "in place": (changed_in_place, "conv has 2 consumers|its input comes from"),
    "not a layer": (not_a_layer, "its input comes from relu, not from a convolution or linear layer"),
    "weight read": (weight_read, "its layer conv has parameters that are also read outside its own forward"),
    "function without bias": (without_bias, "its input comes from conv2d, not from a convolution or linear layer"),
    "function with a foreign bias": (foreign_bias, "its input comes from conv2d, not from a convolution or linear layer"),
    "function with its own padding": (
        own_padding,
        "is called as a function, perhaps with another padding than its own|its input comes from x",
    ),
    "shift read": (shift_read, "has parameters that are also read outside its own forward"),
    "unused": (unused, "is not called in the traced or recorded forward; give an example that reaches it"),
}


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_use_of_the_output_is_respected(name, traceable):
    forward, reason = FORWARDS[name]
    torch.manual_seed(0)
    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want, state = outputs(model, x), copy.deepcopy(model.state_dict())
    report = fuse_(model, x)
    assert report.fused == ()
    assert any(part in report.reason("bn") for part in reason.split("|"))
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
    assert error(outputs(model, x), want) == 0
    with pytest.raises(FuseError, match="bn: "):
        report.require_all()


@pytest.mark.parametrize("functional", [False, True])
def test_models_that_cannot_be_traced_are_recorded(functional):
    def forward(m, x):
        y = F.conv2d(x, m.conv.weight, m.conv.bias, padding=1) if functional else m.conv(x)
        y = m.bn(y)
        return y * y.shape[0] if x.abs().max() > 0.1 else y

    torch.manual_seed(0)
    model = randomized(Net(forward).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    without = fuse_(copy.deepcopy(model))
    assert without.fused == ()
    assert "Give an example to see the whole" in without.notes[0]
    report = fuse_(model, x)
    assert report.fused[0].found_by == "recorder"
    assert "not traceable with torch.fx (TraceError" in report.notes[0]
    assert error(outputs(model, x), want) <= 1e-10


@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_asking_for_the_type_of_a_weight_is_not_reading_it(traceable):
    def forward(m, x):
        return m.bn(m.conv(x.to(m.conv.weight.dtype).to(m.conv.bias))) * m.conv.weight.shape[0]

    torch.manual_seed(0)
    model = randomized(Net(forward if traceable else data_dependent(forward)).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert len(fuse_(model, x).fused) == 1
    assert error(outputs(model, x), want) <= 1e-10


def test_even_the_type_of_a_batchnorm_is_not_there_without_it():
    torch.manual_seed(0)
    model = randomized(Net(lambda m, x: m.bn(m.conv(x.to(m.bn.weight.dtype)))))
    assert "has parameters that are also read outside its own forward" in fuse_(model).reason("bn")


def test_traceable_parts_of_an_untraceable_model_are_folded_without_an_example():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

        def forward(self, x):
            return self.body(x) if x.sum() < 1e9 else x

    torch.manual_seed(0)
    model = randomized(Outer().double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert fuse_(model).fused[0].name == "body.0"
    assert error(outputs(model, x), want) <= 1e-10


def test_optional_arguments_keep_their_default():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x, mask=None, scale=1.0):
            y = self.conv(x)
            if mask is not None:
                y = y * mask
            return self.bn(y) * scale

    torch.manual_seed(0)
    assert len(fuse_(randomized(Masked())).fused) == 1


def test_linear_after_flatten_needs_no_example():
    torch.manual_seed(0)
    model = randomized(
        nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    )
    assert len(fuse_(model).fused) == 2


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 3, 5, 6)])
def test_linear_and_batchnorm_with_the_features_moved(shape):
    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn = nn.Linear(6, 4), nn.BatchNorm2d(4) if len(shape) == 4 else nn.BatchNorm1d(4)

        def forward(self, x):
            y = self.linear(x)
            return self.bn(y.permute(0, 3, 1, 2) if len(shape) == 4 else y.flatten(0, 1))

    torch.manual_seed(0)
    model = randomized(Moved().double())
    x = torch.randn(*shape, dtype=torch.float64)
    want = outputs(model, x)
    assert fuse_(model, x).applied
    assert error(outputs(model, x), want) <= 1e-10


@pytest.mark.parametrize("like", ["reshape_as", "view_as", "zeros_like"])
@pytest.mark.parametrize("traceable", [True, False], ids=["traced", "recorded"])
def test_reading_only_the_shape_of_a_result_is_not_using_it(like, traceable):
    class Tokens(zoo_rest.LinearNorm):
        def forward(self, x):
            if not traceable and float(x.sum()) > 1e9:
                return x
            x = self.linear(x)
            y = self.bn(x.flatten(0, 1))
            return y.view(torch.zeros_like(x).shape) if like == "zeros_like" else getattr(y, like)(x)

    torch.manual_seed(0)
    model = randomized(Tokens(6, 4).double())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert fuse_(model, x).require_all().applied
    assert error(outputs(model, x), want) <= 1e-10


def test_layer_with_its_norm_inside():
    class Wrapper(nn.Conv2d):
        """detectron2's Conv2d."""

        def __init__(self):
            super().__init__(4, 6, 3, padding=1)
            self.norm, self.activation = nn.BatchNorm2d(6), F.relu

        def forward(self, x):
            x = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
            return self.activation(self.norm(x))

    torch.manual_seed(0)
    model = randomized(nn.Sequential(Wrapper(), nn.MaxPool2d(2)).double())
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert fuse_(model, x).fused[0].parts == ("0.norm",)
    assert error(outputs(model, x), want) <= 1e-10


def test_convolution_with_a_forward_of_its_own_is_folded_only_if_that_is_right():
    class Same(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias)

    class Standardized(nn.Conv2d):
        def forward(self, x):
            return self._conv_forward(x, (self.weight - self.weight.mean()) / self.weight.std(), self.bias)

    torch.manual_seed(0)
    for cls, fused in ((Same, 1), (Standardized, 0)):
        model = randomized(nn.Sequential(cls(4, 6, 2), nn.BatchNorm2d(6)).double())
        report = fuse_(model, verify=False)
        assert len(report.fused) == fused
    assert "folding it into 0 would be off by" in report.reason("1")
