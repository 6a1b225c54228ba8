"""What must not be folded is refused by name and with its reason, and left as it was."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.fuse.common import error, outputs, randomized
from tests.fuse.zoo import RepVGGBlock
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


def unused(m, x):
    return m.conv(x)


FORWARDS = {
    "two consumers": (two_consumers, "conv has 2 consumers: bn, relu"),
    "graph output": (graph_output, "conv is also an output of the model"),
    "shared norm": (shared_norm, "is shared: it follows conv, other"),
    "shared conv": (shared_conv, "its layer conv is shared: it is also called without this BatchNorm"),
    "in place": (changed_in_place, "conv has 2 consumers|its input comes from"),
    "not a layer": (not_a_layer, "its input comes from relu, not from a convolution or linear layer"),
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


def pair(layer=None, norm=None):
    return nn.Sequential(layer or nn.Conv2d(4, 4, 1), norm or nn.BatchNorm2d(4)).eval()


class Rounding(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).round()


def hooked(model, index, kind):
    getattr(model[index], kind)(lambda *args: None)
    return model


def trained(model):
    model[1].train()
    return model


def not_finite():
    model = pair()
    model[1].running_var[0] = -1.0
    model[0].weight.data[0] = float("nan")
    return model


class PlainList(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.stages = [self.conv, self.norm]

    def forward(self, x):
        return self.norm(self.conv(x))


def with_quantizer(index):
    model = pair()
    model[index].weight_quantizer = nn.ReLU()
    return model


MODELS = {
    "one in training mode": (lambda: trained(pair()), "1", "in training mode; call .eval() first"),
    "no statistics": (lambda: pair(norm=nn.BatchNorm2d(4, track_running_stats=False)), "1", "keeps no running statistics"),
    "weight norm": (
        lambda: pair(parametrizations.weight_norm(nn.Conv2d(4, 4, 1))),
        "1",
        "is parametrized; call torch.nn.utils.parametrize",
    ),
    "pruned": (lambda: pair(_pruned(nn.Conv2d(4, 4, 1))), "1", "computes its weight (weight_norm, spectral_norm or pruning)"),
    "lazy": (lambda: pair(nn.LazyConv2d(4, 1)), "1", "has an uninitialized weight; run the model once first"),
    "meta": (lambda: pair(nn.Conv2d(4, 4, 1, device="meta")), "1", "has its weight on the meta device; load the weights first"),
    "not finite": (not_finite, "1", "has a weight that is not finite"),
    "own forward": (lambda: pair(norm=Rounding(4)), "1", "is a Rounding, whose forward may do more than BatchNorm"),
    "observed layer": (lambda: hooked(pair(), 0, "register_forward_hook"), "1", "its layer 0 has a forward hook that observes its output"),
    "observed norm": (lambda: hooked(pair(), 1, "register_forward_pre_hook"), "1", "has a forward pre-hook; remove it first"),
    "plain list": (PlainList, "norm", "is also kept in the list stages, outside the module tree"),
    "quantized layer": (lambda: with_quantizer(0), "1", "holds quantizers; expected the order fuse_, quantize_, calibrate"),
    "quantized norm": (lambda: with_quantizer(1), "1", "holds quantizers; expected the order fuse_, quantize_, calibrate"),
    "linear, rank unknown": (
        lambda: pair(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "1",
        "dimensions of its result are unknown; give an example",
    ),
    "channel axis": (lambda: pair(nn.Conv2d(4, 6, 1)), "1", "has 4 channels, its layer 0 6"),
}


def _pruned(layer):
    with torch.no_grad():
        return prune.l1_unstructured(layer, "weight", 0.5)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", MODELS)
def test_layers_that_are_not_plain_numbers_are_refused(name):
    make, norm, reason = MODELS[name]
    model = make().eval() if name != "one in training mode" else make()
    report = fuse_(model)
    assert report.fused == ()
    assert reason in report.reason(norm)
    assert isinstance(model.get_submodule(norm), nn.BatchNorm1d | nn.BatchNorm2d)


def test_a_model_in_training_mode_is_an_error():
    with pytest.raises(FuseError, match=r"the model is in training mode; expected eval mode.* Call model.eval"):
        fuse_(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)))


def test_linear_and_batchnorm_on_tokens_of_the_same_number_as_features():
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double())
    tokens, rows = torch.randn(2, 4, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    report = fuse_(model, tokens)
    assert "is linear on a 3-d input: its features are the last axis, BatchNorm normalises axis 1" in report.reason("1")
    want = outputs(model, rows)
    assert fuse_(model, rows).applied
    assert error(outputs(model, rows), want) <= 1e-10


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


def test_failed_whole_model_check_leaves_everything_as_it_was():
    class Watching(nn.Module):
        """Its output depends on how it is built, so that only the check of the whole model can notice."""

        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return self.bn(self.conv(x)) * (2 if type(self.bn) is nn.Identity else 1)

    torch.manual_seed(0)
    model = randomized(Watching())
    conv, norm, weight = model.conv, model.bn, model.conv.weight
    state = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="the fused model is off by 1.0e.00; expected at most 1e-04. The model is left as it was"):
        report = fuse_(model, torch.randn(2, 4, 5, 5))
    assert not report.applied
    assert report.error == pytest.approx(1.0, rel=1e-3)
    assert (model.conv, model.bn, model.conv.weight) == (conv, norm, weight)
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


def test_models_that_cannot_be_copied_are_an_error():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    prune.l1_unstructured(model[0], "weight", 0.5)  # the weight is the result of a computation now
    with pytest.raises(FuseError, match=r"the model cannot be copied .*; expected one that copy.deepcopy takes. Make weights"):
        fuse_(model)


def quantizer_in(block):
    block.rbr_dense.conv.weight_quantizer = nn.ReLU()


BLOCKS = {
    "holds quantizers; expected the order fuse_, quantize_, calibrate": quantizer_in,
    "rbr_1x1.bn is in training mode; call .eval() first": lambda block: block.rbr_1x1.bn.train(),
    "rbr_dense.conv has a forward hook; remove it first": lambda block: block.rbr_dense.conv.register_forward_hook(lambda *args: None),
    "rbr_1x1.conv is parametrized": lambda block: parametrizations.weight_norm(block.rbr_1x1.conv),
}


@pytest.mark.parametrize("reason", BLOCKS)
def test_blocks_are_refused_with_the_reason(reason):
    torch.manual_seed(0)
    model = randomized(nn.Sequential(RepVGGBlock(4, 4)))
    BLOCKS[reason](model[0])
    report = fuse_(model)
    assert "is a repvgg block; " + reason in report.reason("0")
    assert hasattr(model[0], "rbr_dense")
    assert not hasattr(model[0], "rbr_reparam")


def test_a_block_whose_forward_does_more_is_refused_with_the_size_of_the_error():
    class Strange(RepVGGBlock):
        def forward(self, x):
            return super().forward(x) + (0 if hasattr(self, "rbr_reparam") else 0.25)

    class StrangeAndUntraceable(Strange):
        def forward(self, x):
            return super().forward(x) if float(x.detach().sum()) < 1e9 else x

    torch.manual_seed(0)
    x = torch.randn(1, 4, 6, 6)
    model = randomized(nn.Sequential(StrangeAndUntraceable(4, 4)))
    want = outputs(model, x)
    report = fuse_(model, x)
    assert "looks like a repvgg block; merging would be off by" in report.reason("0")
    assert len(report.fused) == 2  # two of its BatchNorms still fold into their own convolutions
    assert hasattr(model[0], "rbr_dense")
    assert error(outputs(model, x), want) <= 1e-5
    traceable = randomized(nn.Sequential(Strange(4, 4)))
    want = outputs(traceable, x)
    report = fuse_(traceable, x)
    assert (report.fused[0].kind, report.refused) == ("unknown block", ())
    assert error(outputs(traceable, x), want) <= 1e-5
